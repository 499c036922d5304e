"""Settings of PyTorch's caching allocator of GPUs, other than those in the environment."""

from __future__ import annotations

import os

import torch

_KEY = "expandable_segments"
_ours = {"may expand": True, "expand": False}
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments() -> bool:
    """Let segments grow from now on, unless the user has decided how; return whether they do now.

    PyTorch takes all settings at once: the present ones are given again.
    """
    settings = _settings()
    if (
        not _ours["may expand"]
        or torch.cuda.get_allocator_backend() != "native"
        or _KEY in settings
    ):
        return False
    _set(",".join(filter(None, (settings.strip(" ,"), f"{_KEY}:True"))))
    _ours["expand"] = True
    return True


def divide_coarsely() -> None:
    """Keep segments as they are, for good: growing segments divide blocks to the last bytes.

    The user's own settings stay.
    """
    _ours["may expand"] = False
    if _ours["expand"]:
        _ours["expand"] = False
        others = (entry for entry in _settings().split(",") if _KEY not in entry)
        _set(",".join([*filter(None, others), f"{_KEY}:False"]))


def segments_expand() -> bool:
    """Return whether segments grow now, by whichever setting."""
    return f"{_KEY}:True" in _settings()


def _settings() -> str:
    """Return the settings as they are now, of the environment where none have been set since."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:  # before PyTorch 2.12
        known = torch.cuda.memory._snapshot()["allocator_settings"]
        now = str(known.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        if known[_KEY] and _KEY not in now:
            now = ",".join(filter(None, (now, f"{_KEY}:True")))
    else:
        now = read()
    return now or next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")


def _set(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
