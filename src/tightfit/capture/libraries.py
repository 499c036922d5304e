"""Whose code is whose: PyTorch's and ours, the standard library's, an installed library's."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path

import numpy
import torch

_PATHS = sysconfig.get_paths()
_SITE_PACKAGES = (_PATHS["purelib"], _PATHS["platlib"])
_STANDARD = (_PATHS["stdlib"], _PATHS["platstdlib"], "<frozen ")
_OWN = str(Path(__file__).parents[1])
_OWN_LIBRARIES = ("torch", "torchgen", "numpy", "sympy", "mpmath", "networkx")
_INSTALLED = {*_SITE_PACKAGES, *(str(Path(m.__file__ or "").parents[1]) for m in (torch, numpy))}
_KNOWN = (_OWN, *(f"{folder}/{name}/" for folder in _INSTALLED for name in _OWN_LIBRARIES))


@functools.cache
def is_library(file: str | None) -> bool:
    """Whether a file was installed, or has none: its module's globals are taken for constants."""
    return file is None or file.startswith((*_SITE_PACKAGES, *_KNOWN, *_STANDARD))


def is_ours(module: str | None) -> bool:
    """Whether a module of this name is PyTorch's, ours or part of the standard library."""
    top = (module or "builtins").partition(".")[0]
    return top in ("tightfit", *_OWN_LIBRARIES) or (
        top in sys.stdlib_module_names and top != "__main__"
    )
