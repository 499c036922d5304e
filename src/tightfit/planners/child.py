"""Run a function in a process of its own that can be stopped for good.

Solvers overrun their limits inside presolve or one large linear program and cannot be interrupted
there. Some cannot be loaded into one process. A planner in a thread keeps a program that trains
waiting for the interpreter's lock. A child can be killed; its reports until then are kept. It
runs `main`, never the user's main module, imports no torch, and ends when its parent does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

_LOWEST_PRIORITY = 19
_HEADER = struct.Struct("<Q")
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # the parent decides
    "import sys; sys.path[:] = sys.argv[3:]; from tightfit.planners.child import main; main()"
)
Report = Callable[[bytes], None]


def run_in_child(
    target: str, payload: bytes, *, seconds: float, on_report: Report, gives_way: bool = False
) -> bool:
    """Call ``target(payload, report)`` in a child process.

    `target`: ``"module:function"``. `seconds`: after this the child is killed. `on_report`: called
    here with everything the child reports, and with ``b""`` every 0.2 s in between. An error that
    it raises ends the child. `gives_way`: whether the child runs only when the processor is idle,
    where the system can see to that. Returns whether the child finished by itself. Raises
    `RuntimeError` if the child failed; carries the end of its standard error.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, target, str(int(gives_way)), *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,  # no session of its own: Linux would let it take as much as all others
        )
        assert child.stdin is not None
        try:
            finished = _exchange(child, payload, deadline, on_report)
        finally:
            child.kill()
            child.wait()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        if finished and child.returncode not in (0, -9):
            errors.seek(0)
            tail = errors.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"the process of {target} ended with {child.returncode}:\n{tail}")
        return finished


def _exchange(
    child: subprocess.Popen[bytes], payload: bytes, deadline: float, on_report: Report
) -> bool:
    assert child.stdin is not None and child.stdout is not None
    inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_all, args=(child.stdout, inbox), daemon=True)
    reader.start()
    with contextlib.suppress(BrokenPipeError):  # its end shows the child that its parent is gone
        child.stdin.write(_HEADER.pack(len(payload)) + payload)
        child.stdin.flush()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            message = inbox.get(timeout=min(0.2, left))
        except queue.Empty:
            on_report(b"")
            continue
        if message is None:
            # everything is reported; a child slow to end on a busy machine is killed by the caller
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(left, 1.0))
            return True
        on_report(message)


def _read_all(stream: BinaryIO, inbox: queue.SimpleQueue[bytes | None]) -> None:
    with stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            (length,) = _HEADER.unpack(header)
            message = stream.read(length)
            if len(message) < length:
                break
            inbox.put(message)
    inbox.put(None)


def main() -> None:
    """Serve one call: the payload from standard input, reports to standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    stdin = sys.stdin.buffer
    (length,) = _HEADER.unpack(stdin.read(_HEADER.size))
    payload = stdin.read(length)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(message: bytes) -> None:
        out.write(_HEADER.pack(len(message)) + message)
        out.flush()

    function = getattr(importlib.import_module(module), name)
    if sys.argv[2] == "1" and hasattr(os, "nice"):  # its imports would take a minute where all work
        os.nice(_LOWEST_PRIORITY)
    function(payload, report)


def _end_with_parent() -> None:
    os.read(0, 1)  # until the pipe is closed: nothing more is written to it
    os.kill(os.getpid(), signal.SIGTERM)
