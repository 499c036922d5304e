"""Far memory of a step on the CPU: a file, copied by threads."""

from __future__ import annotations

import tempfile
import time
import weakref
from typing import BinaryIO

import torch

from tightfit.errors import OffloadFailed
from tightfit.execution.far.copier import Copier, Transfer, reading, writing
from tightfit.execution.far.offload import Offload
from tightfit.execution.far.space import FarValue, Space
from tightfit.execution.far.step import FarStep
from tightfit.units import format_bytes


class FileStep(FarStep):
    """Values in a file without a name: nothing is left of it when the process ends.

    `offload`: how much may be there, and in which folder.
    """

    def __init__(self, offload: Offload) -> None:
        super().__init__(Space(offload.size_bytes))
        self._place = offload.place
        self._under_way: dict[int, tuple[Copier, Transfer]] = {}
        self._stall_s = 0.0
        try:
            file = tempfile.TemporaryFile(dir=offload.place, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        self._stores = Copier(writing(file.fileno()), "tightfit far memory, stores")
        self._loads = Copier(reading(file.fileno()), "tightfit far memory, loads")
        self.close = weakref.finalize(self, _close, file, self._stores, self._loads)

    def _begin_store(self, value: int, content: torch.Tensor, away: FarValue) -> None:
        self._begin(self._stores, value, content, away)

    def _begin_load(self, value: int, content: torch.Tensor, away: FarValue) -> None:
        self._begin(self._loads, value, content, away)

    def _begin(self, copier: Copier, value: int, content: torch.Tensor, away: FarValue) -> None:
        memory = memoryview(content.numpy())  # which keeps the storage alive
        self._under_way[value] = copier, copier.begin(memory, away.extents)

    def _arrive(self, value: int) -> None:
        copier, transfer = self._under_way.pop(value)
        began = time.perf_counter()
        copier.wait(transfer)
        self._stall_s += time.perf_counter() - began
        if transfer.error is not None:
            raise self._failed(transfer.error) from transfer.error

    def _stalled_s(self) -> float:
        return self._stall_s

    def _failed(self, error: BaseException) -> OffloadFailed:
        why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        return OffloadFailed(
            f"far memory in {self._place} failed during a step ({why}) after "
            f"{format_bytes(self._stored_bytes)} were stored: the step is dropped, parameters are "
            "as before it. Way out: a folder with more room (tightfit.Offload(size, "
            "folder=...)), or a smaller offload="
        )


def _close(file: BinaryIO, *copiers: Copier) -> None:
    for copier in copiers:
        copier.close()
    file.close()
