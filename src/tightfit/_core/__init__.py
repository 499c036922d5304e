"""The C++ engine (nanobind, no torch headers)."""
