"""Starting the ranks of a distributed test, each in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

_TESTS = Path(__file__).parents[1]


def run_ranks(script: ModuleType, *words: str, longest_s: float = 540) -> list[str]:
    """Run ``python -m SCRIPT RANK PORT WORDS...`` on two ranks; return what those failing said.

    A rank that has not ended after `longest_s` hangs: half a minute of work took six minutes on a
    core with fourteen others. It is ended, and says where it stood.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        ranks: list[subprocess.Popen[bytes]] = []
        for rank, file in enumerate(files):
            command = [sys.executable, "-m", script.__name__, str(rank), str(port), *words]
            with file.open("w") as said:
                ranks.append(subprocess.Popen(command, stderr=said, env={**os.environ, **own}))
        try:
            hanging = _wait(ranks, time.monotonic() + longest_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [
            f"ended after {longest_s:.0f} s\n" * (rank in hanging) + file.read_text()
            for rank, file in zip(ranks, files, strict=True)
            if rank.returncode
        ]
        print(*failed, sep="\n", file=sys.stderr)  # whole, should the test fail
        return failed


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[subprocess.Popen[bytes]]:
    """Wait for ranks to end; return those that did not, after letting them say where they stand."""
    hanging: list[subprocess.Popen[bytes]] = []
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            hanging.append(rank)
    for rank in hanging:
        rank.send_signal(signal.SIGABRT)  # the fault handler writes the stacks of all threads
    for rank in hanging:
        rank.wait()
    return hanging


@contextlib.contextmanager
def in_group(rank: int, port: int) -> Iterator[None]:
    """Let this process be a rank of two meanwhile."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def end_rank() -> None:
    """End the process of a rank that has passed, without tearing the interpreter down.

    A device mesh keeps its process group alive, and a thread of that group may still free the
    tensors of its last work; doing so while the interpreter is torn down aborts the process, with
    or without tightfit (pytorch #179291, #190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
