"""The compiled core: built once for a release of PyTorch and kept among the caches."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tightfit.files import cache_folder, write_atomically
from tightfit.progress import said_while_waiting

__all__ = ["CoreUnavailable", "built_library", "compiled_core"]

_NAME = "tightfit_online_core"
_HERE = Path(__file__).parent
_SHARED = _HERE.parent.parent / "_core" / "evicted_classes.hpp"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_LIBRARIES = ("torch_python", "torch_cpu", "c10")
_LONGEST_S = 1200


class CoreUnavailable(Exception):
    """The core cannot be compiled or loaded here; the text says why."""


def compiled_core() -> Any:
    """Return the compiled module; compiles it, which takes a minute, where nobody has before.

    Raises
    ------
    CoreUnavailable
        Without a compiler or headers, or if the compiler refuses.
    """
    core = _compiled_core()
    if isinstance(core, str):
        raise CoreUnavailable(core)
    return core


@functools.cache
def _compiled_core() -> Any:
    """Return the module, or in words why there is none."""
    try:
        module = _load(built_library())
        reason = str(module.install())
    except (CoreUnavailable, ImportError, OSError) as error:
        return str(error).strip() or type(error).__name__
    return reason or module


def built_library() -> Path:
    """Return the compiled file; compiles it where nobody has before, or nobody with this PyTorch.

    Raises
    ------
    CoreUnavailable
        Without a compiler or headers, or if the compiler refuses, now or before.
    """
    command = _command()
    key = hashlib.sha256("\0".join((*command, *_circumstances())).encode())
    for source in _sources():
        key.update(source.read_bytes())
    folder = cache_folder("online_core")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{key.hexdigest()[:24]}.so"
    with _alone(library.with_suffix(".lock")):
        if not library.exists():
            _compile(command, library)
    return library


def _sources() -> list[Path]:
    return [*sorted(_HERE.glob("*.hpp")), *sorted(_HERE.glob("*.cpp")), _SHARED]


def _circumstances() -> tuple[str, ...]:
    """What decides, beside sources and the command, what comes out."""
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


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let processes that would compile the same wait for the one that does."""
    try:
        import fcntl
    except ImportError:  # both compile: the file is put in its place as a whole
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], library: Path) -> None:
    """Compile, unless that has failed here before."""
    failed = library.with_suffix(".txt")
    if failed.exists():
        raise CoreUnavailable(f"the compiler refused before, see {failed}; delete it to try again")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        with said_while_waiting(lambda: "compiling the core of tightfit.online, once for PyTorch"):
            done = subprocess.run(
                [*command, "-o", str(output)],
                capture_output=True,
                text=True,
                timeout=_LONGEST_S,
                check=False,
            )
        if done.returncode:
            write_atomically(failed, (shlex.join(command) + "\n" + done.stderr).encode())
            raise CoreUnavailable(f"the compiler refuses, see {failed}")
        output.replace(library)


def _load(library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
