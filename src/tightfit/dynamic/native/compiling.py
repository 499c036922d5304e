"""A library compiled once and kept: by this process, or by another in the background.

The other process runs `main` at the lowest priority and ends on its own, after this process if need
be; it imports no torch. Next to a library are its lock and, if the compiler refused, a note.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tightfit.files import write_atomically

_LONGEST_S = 1200
_LOWEST_PRIORITY = 19
_PROGRAM = "from tightfit.dynamic.native.compiling import main; main()"


class CoreUnavailable(Exception):
    """The core cannot be compiled or loaded here; the text says why."""


class BeingCompiled(CoreUnavailable):
    """The core is not there yet."""


class ForLaterReleases(CoreUnavailable):
    """The core needs a later PyTorch."""


def compile_here(library: Path, command: Sequence[str]) -> None:
    """Compile a library, unless it is there; wait for a process that does so already.

    `library`: where it belongs; it is put there as a whole. `command`: compiles it, less its
    output. Raises `CoreUnavailable` if the compiler refuses, now or before.
    """
    with _alone(library.with_suffix(".lock")):
        if library.exists():
            return
        _stop_if_refused(library)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            output = Path(folder) / library.name
            refusal = _refusal([*command, "-o", str(output)])
            if refusal:
                note = f"{shlex.join(command)}\n{refusal}"
                write_atomically(_note(library), note.encode())
                raise CoreUnavailable(f"the compiler refuses, see {_note(library)}")
            output.replace(library)


def compile_apart(library: Path, command: Sequence[str]) -> BeingCompiled:
    """Have a process of its own do so, once; return a message for users who want it now.

    Raises `CoreUnavailable` if the compiler has refused, or the process has failed.
    """
    _stop_if_refused(library)
    child = _child(library, tuple(command))
    if child.returncode:
        raise CoreUnavailable(f"the process that compiles it has ended with {child.returncode}")
    return BeingCompiled("the core in C++ is being compiled, for regions that begin after that")


def main() -> None:
    """Compile by the command line: the library, then the command."""
    library, *command = sys.argv[1:]
    if sys.platform != "win32":
        os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(CoreUnavailable):  # the note says why
        compile_here(Path(library), command)


@functools.cache
def _child(library: Path, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a process that compiles a library, and a thread that notices its end."""
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(library), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=child.wait, daemon=True, name="tightfit compiler").start()
    return child


def _note(library: Path) -> Path:
    """Return where it says why there is no library."""
    return library.with_suffix(".txt")


def _stop_if_refused(library: Path) -> None:
    note = _note(library)
    if note.exists():
        raise CoreUnavailable(f"the compiler refused before, see {note}; delete it to try again")


def _refusal(command: list[str]) -> str:
    """Run a compiler; return why it failed, if it did."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the compiler did not end within {_LONGEST_S} seconds"
    if not done.returncode:
        return ""
    return done.stderr or f"the compiler ended with {done.returncode}"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let processes that would compile the same wait for the process that does."""
    try:
        import fcntl
    except ImportError:  # both compile: the file is put in its place as a whole
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
