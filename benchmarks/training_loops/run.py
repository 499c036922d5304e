"""One training loop under watch: fitted or plain, metered for its whole life.

The meter reads the bytes that PyTorch's allocator has allocated in this process since the first
call of `Run.fit`, and adds the models that are fitted. It keeps the largest such number of every
instant, not that of some moments, and has nothing to do with what tightfit inspects, plans or
measures by itself: parameters, copies that are made later, batches, activations, gradients, the
optimizer's state and its scratch, and whatever tightfit takes in order to look, to measure and to
plan are all in it. What was there before and is no model that is fitted, such as data or averaged
weights, is not. Each step ends with `Run.note`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

import tightfit
from tightfit.allocator import Meter, meter_for
from tightfit.allocator.refusals import is_refusal, likely_further_bytes, refused_bytes
from tightfit.allocator.resident import granularity_of, resident_tensor_bytes
from tightfit.errors import BudgetExceeded, InfeasibleBudget
from tightfit.torch_private.storages import free_failed_backward

__all__ = ["Life", "Run", "live"]

Size = TypeVar("Size")


@dataclass(frozen=True)
class Life:
    """What one run of a loop gave and held.

    Parameters
    ----------
    budget_bytes : int or None
        None: plain PyTorch. Of models with budgets of their own the sum.
    whole_bytes : int
        The most at any instant from `fit` on, errors included.
    found_bytes : int
        Parameters and buffers of the models as they were fitted.
    peaks_bytes : tuple of int
        From `fit` on the most of each step; the first one begins with the call of `fit`, and what
        follows the last step is one more.
    seconds : tuple of float
        Of each step, the first from the end of `fit`.
    losses : tuple of str
        Every loss of every step, bit by bit.
    parameters : str
        A digest of parameters and buffers in the end.
    error : str
        What ended the loop before its time; "": nothing did.
    advised_bytes : int or None
        The least budget that the error names.
    """

    budget_bytes: int | None
    whole_bytes: int
    found_bytes: int
    peaks_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[str, ...]
    parameters: str
    error: str = ""
    advised_bytes: int | None = None

    @property
    def largest_bytes(self) -> int:
        """The most at any instant from `fit` on."""
        return max(self.peaks_bytes, default=0)


class ReservedBytes:
    """Counts the bytes that PyTorch's CUDA allocator has taken from the device.

    Its peak goes on from the first `reset_peak`: the device has one peak for all readers.
    """

    shares_peak = True

    def __init__(self) -> None:
        self._has_begun = False

    def live_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved()

    def reset_peak(self, *, quietly: bool = False) -> None:
        if not (self._has_begun or quietly):
            self._has_begun = True
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def take_peak_bytes(self, *, quietly: bool = False) -> int:
        return self.peak_bytes()

    def held_bytes(self) -> int:
        return self.live_bytes()


class Run:
    """What a loop is given: how long and how large it is, and the lines that fit a model.

    Parameters
    ----------
    budget_bytes : int or None
        The budget of every model; None: plain PyTorch.
    steps : int
        How many training steps the loop takes.
    small : bool
        Whether models are as small as a test needs them.
    rank, port : int
        Of a loop whose processes train together.
    device : str
        Of models and batches: PyTorch's default device of the process.
    **keywords
        Of every `fit`, besides those that the loop gives.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        *,
        steps: int,
        small: bool,
        rank: int = 0,
        port: int = 0,
        device: str = "cpu",
        **keywords: Any,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.steps = steps
        self.small = small
        self.rank = rank
        self.port = port
        self._keywords = keywords
        free_failed_backward()  # what an earlier loop has left must not be freed amid this one
        gc.collect()
        self.device = device
        self._meter: Meter = ReservedBytes() if device == "cuda" else meter_for(device)
        self._base_bytes = self._meter.live_bytes()
        self._life = Life(budget_bytes, 0, 0, (), (), (), "")
        self._is_fitted = False
        self._began_s = 0.0

    # -- for loops ----------------------------------------------------------------------------

    def size(self, small: Size, full: Size) -> Size:
        """Return the one of two sizes that is asked for."""
        return small if self.small else full

    def budget(self) -> tightfit.Budget | None:
        """Return one budget for several models."""
        return None if self.budget_bytes is None else tightfit.Budget(self.budget_bytes)

    def fit(
        self, model: nn.Module, budget: Any = None, *, share: float = 1.0, **keywords: Any
    ) -> nn.Module:
        """Fit a model as `tightfit.fit` does, within the loop's budget; plainly do nothing.

        Parameters
        ----------
        budget : tightfit.Budget, optional
            Shared with others.
        share : float
            Of the loop's budget, for a model with a budget of its own.
        """
        if not self._is_fitted:
            self._is_fitted = True
            self._meter.reset_peak()
            self._base_bytes = self._meter.live_bytes()
        members = (*model.parameters(), *model.buffers())
        held_bytes = resident_tensor_bytes(members, granularity_of(self.device))
        self._base_bytes -= held_bytes
        self._change(found_bytes=self._life.found_bytes + held_bytes)
        if self.budget_bytes is not None:
            own = budget or int(share * self.budget_bytes)
            tightfit.fit(model, own, **keywords, **self._keywords)
        self._began_s = time.perf_counter()
        return model

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Take a step: backward, optimizer, no gradients any more; note its loss."""
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.note(loss)

    def note(self, *losses: Tensor | float) -> None:
        """End a step: note its losses, its seconds and the most it held."""
        now_s = time.perf_counter()
        values = [loss.item() if isinstance(loss, Tensor) else loss for loss in losses]
        bits = [float(value).hex() for value in values]
        life = self._life
        self._change(
            losses=(*life.losses, *bits), seconds=(*life.seconds, round(now_s - self._began_s, 5))
        )
        self._end_of_peak(kept=True)
        self._began_s = time.perf_counter()

    def trained(self, *modules: nn.Module) -> None:
        """End the loop: note the bits of what was trained."""
        self._end_of_peak(kept=True)
        digest = hashlib.sha256()
        for module in modules:
            for name, tensor in module.state_dict().items():
                raw = _bytes_of(tensor)
                digest.update(name.encode() + raw)
        self._change(parameters=digest.hexdigest())

    # -- for what starts them -----------------------------------------------------------------

    def life(self, error: BaseException | None) -> Life:
        """Return what the loop gave and held, also if an error has ended it."""
        if error is None:
            return self._life
        self._end_of_peak(kept=self._is_fitted)
        advised = error.minimum_bytes if isinstance(error, InfeasibleBudget) else None
        if isinstance(error, BudgetExceeded):
            advised = error.measured_bytes
        elif is_refusal(error):  # of code that runs outside the planned step
            _, asked_bytes, held_bytes = refused_bytes(error)
            advised = held_bytes + asked_bytes + likely_further_bytes(error)
        asked = getattr(error, "budget_bytes", None)
        if advised and asked and self.budget_bytes:  # of a model that has a part of the budget
            advised = math.ceil(advised * self.budget_bytes / asked)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return dataclasses.replace(self._life, error=text, advised_bytes=advised)

    def _end_of_peak(self, *, kept: bool) -> None:
        """Begin a new peak; the one that ends belongs to a step, or to what was before `fit`."""
        peak_bytes = self._meter.peak_bytes() - self._base_bytes
        self._meter.reset_peak()
        self._change(whole_bytes=max(self._life.whole_bytes, peak_bytes))
        if kept:
            self._change(peaks_bytes=(*self._life.peaks_bytes, peak_bytes))

    def _change(self, **fields: Any) -> None:
        self._life = dataclasses.replace(self._life, **fields)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def live(loop: Callable[[Run], None], run: Run) -> Life:
    """Run a loop from the same seeds as ever; an error ends it, and is part of a fitted one."""
    torch.manual_seed(run.rank)
    random.seed(run.rank)
    numpy.random.seed(run.rank)
    try:
        loop(run)
    except Exception as error:
        if run.budget_bytes is None:
            raise
        return run.life(error)
    return run.life(None)
