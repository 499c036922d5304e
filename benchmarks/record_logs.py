"""Write ``benchmarks/logs``: small logs of our own recorder, of one warm training step each.

python benchmarks/record_logs.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tightfit.dynamic.recorder import Recorder
from tightfit.eviction.log.writer import write_log
from tightfit.studies.model import loss_function
from tightfit.zoo.registry import make

__all__ = ["recorded"]

LOGS = Path(__file__).resolve().parent / "logs"
MODELS = {
    "resnet50": {"batch": 16, "size": 96},
    "unet": {"batch": 2, "size": 128},
}


def recorded(name: str, **setting: int) -> Recorder:
    """Return a recording of the second step of a model of the zoo."""
    torch.manual_seed(0)
    example = make(name, **setting)
    loss_of, args, kwargs = loss_function(example)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=1e-3)
    with Recorder(step=2) as recorder:
        for _ in range(2):
            loss_of(*args, **kwargs).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, setting in MODELS.items():
        write_log(LOGS / f"{name}.log.gz", recorded(name, **setting).instructions())
        print(LOGS / f"{name}.log.gz", (LOGS / f"{name}.log.gz").stat().st_size, "bytes")
