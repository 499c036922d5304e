"""PyTorch's allocator of GPUs: its settings and pools. Private names."""
