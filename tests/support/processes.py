"""Starting the ranks of a distributed test, each in a process of its own."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

__all__ = ["end_rank", "run_ranks"]

_TESTS = Path(__file__).parents[1]


def run_ranks(script: ModuleType, *words: str, timeout: float = 200) -> list[str]:
    """Run ``python -m SCRIPT RANK PORT WORDS...`` on two ranks; return what those failing said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        ranks = []
        for rank, file in enumerate(files):
            command = [sys.executable, "-m", script.__name__, str(rank), str(port), *words]
            with file.open("w") as said:
                ranks.append(subprocess.Popen(command, stderr=said, env=environment))
        try:
            for rank in ranks:
                rank.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # a rank that had to be ended has failed
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [
            file.read_text() for rank, file in zip(ranks, files, strict=True) if rank.returncode
        ]
        print(*failed, sep="\n", file=sys.stderr)  # whole, should the test fail
        return failed


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
