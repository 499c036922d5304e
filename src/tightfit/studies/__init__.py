"""A model that a user names: captured on fake tensors, or trained and compared with plain PyTorch.

In: a name, a factory or its result (`model.py`). Out: a captured step without running it
(`dry_step.py`), a `Proof` (`comparison.py`), rows of PyTorch's own methods (`pytorch_methods.py`).
May import the rooms that `session` may, `session` and `zoo`.
"""
