"""Starting the ranks of a distributed test, each in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run_ranks"]


def run_ranks(script: str, *words: str, timeout: float = 200) -> list[str]:
    """Run ``python SCRIPT RANK PORT WORDS...`` on two ranks; return what those that failed said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        ranks = []
        for rank, file in enumerate(files):
            command = [sys.executable, script, str(rank), str(port), *words]
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
        return [
            file.read_text() for rank, file in zip(ranks, files, strict=True) if rank.returncode
        ]
