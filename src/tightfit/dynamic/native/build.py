"""The compiled core: built once for a release of PyTorch, kept among the caches, loaded once."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from tightfit.dynamic.native.compiling import (
    CoreUnavailable,
    ForLaterReleases,
    compile_apart,
    compile_here,
)
from tightfit.files import cache_folder
from tightfit.progress import announce, said_while_waiting
from tightfit.torch_private.releases import COMPILED_ONLINE

_NAME = "tightfit_online_core"
_HERE = Path(__file__).parent
_SHARED = _HERE.parent.parent / "_core" / "eviction.hpp"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_LIBRARIES = ("torch_python", "torch_cpu", "c10")


def compiled_core(*, waits: bool = True) -> Any:
    """Return the compiled module; where it is not compiled yet, that takes half a minute.

    `waits`: until it is compiled. If not, it is compiled in the background. Raises
    `CoreUnavailable` without a compiler or headers, on an older PyTorch, or if the compiler
    refuses, now or before. Raises `BeingCompiled` if it is not there yet and `waits` is False.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    if not COMPILED_ONLINE.is_available:
        raise ForLaterReleases(
            f"it needs PyTorch {COMPILED_ONLINE.name} or later; here is {torch.__version__}"
        )
    try:
        core = _loaded(_library(waits))
    except OSError as error:
        raise CoreUnavailable(str(error)) from None
    if isinstance(core, str):
        raise CoreUnavailable(core)
    return core


def _library(waits: bool) -> Path:
    """Return the compiled file; has it compiled where it is missing for this PyTorch."""
    command = _command()
    key = hashlib.sha256("\0".join((*command, *_circumstances())).encode())
    for source in _sources():
        key.update(source.read_bytes())
    folder = cache_folder("online_core").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    if not waits:
        being_compiled = compile_apart(library, command)
        _announce_once()
        raise being_compiled
    with said_while_waiting(lambda: "compiling the core of tightfit.online, once for this PyTorch"):
        compile_here(library, command)
    return library


@functools.cache
def _announce_once() -> None:
    announce(
        "compiling the core of tightfit.online in the background, once for this PyTorch. Regions "
        "that begin after that use it. This one stays with Python, which costs each operator more "
        "(core='C++' waits instead)"
    )


def _sources() -> list[Path]:
    return [*sorted(_HERE.glob("*.hpp")), *sorted(_HERE.glob("*.cpp")), _SHARED]


def _circumstances() -> tuple[str, ...]:
    """Versions that decide the result, with sources and the command."""
    git = str(torch.version.git_version)
    return torch.__version__, git, str(sys.implementation.cache_tag), platform.machine()


def _command() -> list[str]:
    """Return the command that compiles the core, less its output."""
    named = shlex.split(os.environ.get("CXX") or "c++")
    if not named or not shutil.which(named[0]):
        raise CoreUnavailable("no C++ compiler was found")
    python = Path(sysconfig.get_paths()["include"])
    torch_home = Path(torch.__file__).parent
    headers = (torch_home / "include", torch_home / "include/torch/csrc/api/include", python)
    for header in (python / "Python.h", headers[0] / "torch/library.h"):
        if not header.exists():
            raise CoreUnavailable(f"{header} is missing")
    return [
        *named,
        *_FLAGS,
        f"-DTIGHTFIT_MODULE={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{folder}" for folder in headers),
        str(_HERE / "module.cpp"),
        f"-L{torch_home / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]


@functools.cache
def _loaded(library: Path) -> Any:
    """Return the module, known to Python from now on, or in words why it cannot be loaded."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return str(error).strip() or type(error).__name__
    reason = str(module.install())
    if not reason:
        sys.modules[_NAME] = module
    return reason or module
