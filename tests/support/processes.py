"""Starting the ranks of a distributed test, each in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

__all__ = ["run_ranks"]


def run_ranks(script: str, *words: str, timeout: float = 300) -> list[str]:
    """Run ``python SCRIPT RANK PORT WORDS...`` on two ranks; return what those that failed said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port), *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
