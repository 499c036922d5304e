"""Train any PyTorch model inside a memory budget given in bytes, at the least extra compute."""

__version__ = "0.1.0"
