"""Far memory of one fitted model, by the device that it trains on."""

from __future__ import annotations

import torch

from tightfit.errors import BadInput
from tightfit.execution.far.file import FileStep
from tightfit.execution.far.offload import Offload
from tightfit.execution.far.pinned import CudaStreams, PinnedMemory, PinnedStep
from tightfit.execution.far.step import FarStep


class FarMemory:
    """Begins the far memory of each step; pinned memory of a GPU stays for later steps."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._pinned: dict[torch.device, PinnedMemory] = {}

    def begin_step(self, device: torch.device) -> FarStep:
        """Return the far memory of a new step.

        Raises `BadInput` while a CUDA graph is recorded.
        """
        if device.type == "cpu":
            return FileStep(self._offload)
        if torch.cuda.is_current_stream_capturing():
            raise BadInput("offload= does not go with torch.cuda.graph yet: leave one of them out")
        if device not in self._pinned:
            streams = CudaStreams(device)
            self._pinned[device] = PinnedMemory(self._offload.size_bytes, streams)
        return PinnedStep(self._pinned[device])
