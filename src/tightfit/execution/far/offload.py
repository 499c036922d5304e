"""Far memory as a user asks for it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tightfit.execution.far import links
from tightfit.plan.plan import Far
from tightfit.units import parse_bytes

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Offload:
    """Memory that a plan may move values to.

    On the CPU that is a file in a folder, without a name; on a GPU it is pinned memory of the host.

    Parameters
    ----------
    size : int or str
        How much a step may hold there: bytes, or text such as ``"16GiB"``.
    folder : str or Path, optional
        Where the file is, on a disk with that much room. Default: the folder that ``TMPDIR`` names,
        or ``/var/tmp``. Only on the CPU.
    optimizer_state : bool
        With ``update_in_backward=True``: whether the large tensors of the optimizer's state are
        there, too, from the first step on. They stay there when the model is no longer fitted. Only
        on the CPU.

    Examples
    --------
    >>> tightfit.fit(model, "8GiB", offload=tightfit.Offload("16GiB", folder="/scratch"))
    """

    size: int | str
    folder: str | Path | None = None
    optimizer_state: bool = False

    def __post_init__(self) -> None:
        """Refuse a size that is none, and a folder in which no file can be made."""
        parse_bytes(self.size, what="offload")
        if self.folder is not None:
            links.refuse_without_file(self.place)

    @cached_property  # asked for at every store
    def size_bytes(self) -> int:
        return parse_bytes(self.size, what="offload")

    @cached_property  # asked for in every step
    def place(self) -> Path:
        if self.folder is not None:
            return Path(self.folder).expanduser().resolve()
        usual = Path("/var/tmp")
        if usual.is_dir() and "TMPDIR" not in os.environ:
            return usual
        return Path(tempfile.gettempdir()).resolve()

    def far(
        self,
        device: torch.device = _CPU,
        *,
        threads: int = 1,
        keeps: bool = True,
        taken_bytes: int = 0,
    ) -> Far:
        """Return it as planners know it.

        `device`: where models train. `threads`: of operators: their costs are the processor time of
        all of them together, so a second of a transfer is as long as that of so many; 1 on a GPU.
        `keeps`: whether measurements of the link are kept on disk. `taken_bytes`: bytes in the file
        in every step.
        """
        if device.type == "cpu":
            link = links.file_link(self.place, keeps=keeps)
        else:
            link = links.pinned_link(device, keeps=keeps)
        return Far(
            capacity_bytes=self.size_bytes - taken_bytes,
            store_bytes_per_s=link.store_bytes_per_s / threads,
            load_bytes_per_s=link.load_bytes_per_s / threads,
            latency_s=link.latency_s * threads,
        )
