"""A model with its data, trained from the same state and seed by any way of running its steps."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy
import torch
from torch import nn

from tightfit.allocator.resident import is_part, resident_tensor_bytes
from tightfit.capture.calls.structure import flatten, unflatten
from tightfit.errors import BadInput, NothingToTrain
from tightfit.execution.attach import attached, detach
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.session.callee import Callee
from tightfit.session.fitted import Fitted
from tightfit.session.handles import PlannedStep, fitted_of
from tightfit.session.memory.account import Account
from tightfit.studies.model import loss_function, model_inputs
from tightfit.torch_private.core import storage_key
from tightfit.zoo import Example

_UNLIMITED = 1 << 60
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""


class Subject:
    """A model with data, an optimizer and a way back to its first state.

    ``loss_of(*args, **kwargs)`` computes its loss.

    `example`: in the place of the model there may be a step (see `with_loss_inside`), planned or
    not. A model that the factory has fitted itself is taken plain. `seed`: of every random number
    drawn in training. `given`: positional and keyword inputs of the model or the step, without
    those that only its loss reads. `loss_is_outside`: whether the loss is computed from outputs of
    the model or the step.
    """

    def __init__(self, example: Example, seed: int) -> None:
        self.step = _taken_plain(example.model)
        if self.step is None:
            self.model: nn.Module = example.model
            computed = example.model, type(example.model).__name__
        else:
            self.model, self._runs = _together(self.step.modules), self.step.function
            computed = self._run_step, self.step.name
        self.loss_of, self.args, self.kwargs = loss_function(example, *computed)
        self.given = model_inputs(example)
        self.loss_is_outside = example.loss is not None
        self.seed = seed
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.initial = {k: v.clone() for k, v in self.model.state_dict().items()}
        leaves = [x for x in flatten((self.args, self.kwargs))[0] if isinstance(x, torch.Tensor)]
        self._inputs = [(leaf, leaf._version, leaf.detach().clone()) for leaf in leaves]
        if not any(p.requires_grad for p in self.model.parameters()):
            raise NothingToTrain("the model has no parameter that needs a gradient")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._account = Account({"model": self.model}, self.optimizer)

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._runs(*args, **kwargs)

    @contextlib.contextmanager
    def running(self, step: PlannedStep) -> Iterator[None]:
        """Have a planned step run in the place of the plain step meanwhile."""
        before, self._runs = self._runs, step
        try:
            yield
        finally:
            self._runs = before

    def make_new_batch(self) -> None:
        """Allocate inputs and the target now: batches are made once a model is fitted.

        Memory allocated before `fit` counts against no budget. What shares memory, or is laid out
        as no copy is, stays.
        """
        leaves, structure = flatten((self.args, self.kwargs, self.given))
        members = [*self.model.parameters(), *self.model.buffers()]
        inputs = {id(leaf): leaf for leaf, _, _ in self._inputs}.values()
        keys = (storage_key(t) for t in (*members, *inputs) if t.layout == torch.strided)
        uses = Counter(keys)
        made: dict[int, torch.Tensor] = {}
        for index, (leaf, _, value) in enumerate(self._inputs):
            if leaf.layout != torch.strided or leaf.stride() != value.stride() or is_part(leaf):
                continue
            if uses[storage_key(leaf)] > 1:
                continue
            twin = made.setdefault(id(leaf), value.clone().requires_grad_(leaf.requires_grad))
            self._inputs[index] = twin, twin._version, value
        new = unflatten([made.get(id(x), x) for x in leaves], structure)
        self.args, self.kwargs, self.given = new

    def has_trained(self) -> bool:
        """Whether a parameter has moved since the first state, or is about to."""
        return any(
            not torch.equal(parameter, self.initial.get(name, parameter))
            or (parameter.grad is not None and not is_zero(parameter.grad))
            for name, parameter in self.model.named_parameters()
        )

    def reset(self) -> None:
        """Put parameters, buffers and inputs back, forget gradients and optimizer state."""
        self.model.load_state_dict(self.initial)
        with torch.no_grad():
            for index, (leaf, version, value) in enumerate(self._inputs):
                if leaf._version != version:  # the forward writes into it
                    leaf.copy_(value)
                    self._inputs[index] = leaf, leaf._version, value
        self.model.zero_grad(set_to_none=True)
        self.optimizer.state.clear()

    def constant_bytes(self) -> int:
        """Return bytes resident now: parameters, buffers, inputs, gradients, optimizer state."""
        leaves = flatten((self.args, self.kwargs))[0]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        held = resident_tensor_bytes(inputs, self._account.granularity_bytes)
        return held + self._account.lasting_bytes()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return gradients, parameters and buffers by name; they are not copied."""
        found = {f"gradient of {k}": p.grad for k, p in self.model.named_parameters()}
        found |= {f"parameter {k}": p.detach() for k, p in self.model.named_parameters()}
        found |= {f"buffer {k}": b for k, b in self.model.named_buffers()}
        return {k: t for k, t in found.items() if t is not None}

    def digests(self) -> dict[str, bytes]:
        """Return a hash of the bits of each of `tensors`."""
        return {key: digest_of(tensor) for key, tensor in self.tensors().items() if tensor.numel()}


def _taken_plain(model: Any) -> Callee | None:
    """Return the callable of a step; give a model that was fitted already its forward back.

    The budget it was made with is enforced no longer.
    """
    if isinstance(model, Callee):
        return model
    if isinstance(model, PlannedStep):
        fitted = fitted_of(model)
        fitted.leave()
        return fitted.callee
    replaced = attached(model)
    if replaced is not None:
        replaced.leave()
        detach(model)
    return None


def with_loss_inside(example: Example) -> Example:
    """Return an example whose model is a step of both, to be planned together: model and loss."""
    loss_of, args, kwargs = loss_function(example)

    def step(*inputs: Any) -> torch.Tensor:
        return loss_of(*inputs[: len(args)], **dict(zip(kwargs, inputs[len(args) :], strict=True)))

    callee = Callee(step, {"model": example.model}, loss_of.__name__)
    return Example(callee, None, (*args, *kwargs.values()), None)


def _together(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return one module that holds those of a step."""
    if len(modules) == 1:
        return next(iter(modules.values()))
    holder = nn.Module()
    for name, module in modules.items():
        holder.add_module(name.replace(".", "_"), module)
    return holder


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return a hash of the bits of a tensor: of a sparse one of its indices and values.

    PyTorch's allocator is not asked for anything: its allocations may be counted.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        digest.update(numpy.ascontiguousarray(_words(part)))
    return digest.digest()


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether all numbers of a gradient are zero; asks for nothing either."""
    words = _words(gradient._values() if gradient.is_sparse else gradient)
    return not numpy.left_shift(words, 1).any()  # without the sign


def _words(tensor: torch.Tensor) -> Any:
    """Return the numbers of a tensor as integers of the same bits."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.detach().view(_WORDS[numbers.element_size()]).cpu().numpy()


class TrainingRecord(msgspec.Struct):
    """The results of a series of steps."""

    losses: list[float]
    digests: list[dict[str, bytes]]
    # peak_bytes, program_bytes: the highest peak of a step from the second on, and of its planned
    # part
    peak_bytes: int
    program_bytes: int
    planned_bytes: int  # planned for the step whose planned part had the highest peak
    constant_bytes: int
    first_s: float

    def note(self, peaks: StepPeaks, planned_bytes: int) -> None:
        """Record the bytes that a step held, and those planned for it."""
        self.peak_bytes = max(self.peak_bytes, peaks.peak_bytes)
        if peaks.program_bytes > self.program_bytes:
            self.program_bytes, self.planned_bytes = peaks.program_bytes, planned_bytes
        self.constant_bytes = peaks.constant_bytes


def train(
    subject: Subject,
    function: Callable[..., torch.Tensor],
    steps: int,
    planned: Fitted | None = None,
) -> TrainingRecord:
    """Run steps from the first state; a guard of our own watches when the function has none.

    `function`: computes the loss from the subject's inputs. `steps`: optimizer steps; peaks are
    those of the second and later ones. `planned`: the callable that runs the function, if it is a
    planned step.
    """
    subject.reset()
    own = Guard(subject.device.type, "warn")
    trace = TrainingRecord([], [], 0, 0, 0, 0, 0.0)
    _seed_all(subject.seed)
    for index in range(steps):
        subject.model.zero_grad(set_to_none=True)
        gc.collect()
        began = time.perf_counter()
        loss = _watched_step(subject, function, own if planned is None else None)
        if index == 0:
            trace.first_s = time.perf_counter() - began
        peaks = own.close() if planned is None else planned.close_step()
        if peaks is not None and index > 0:
            trace.note(peaks, planned_bytes_of(planned) if planned else 0)
        trace.losses.append(loss)
        trace.digests.append(subject.digests())
    return trace


def planned_bytes_of(planned: Fitted) -> int:
    """Return the peak that was planned for the last step; 0 where nothing was."""
    with contextlib.suppress(BadInput):
        return planned.report().planned_peak_bytes
    return 0


def _seed_all(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _watched_step(
    subject: Subject, function: Callable[..., torch.Tensor], guard: Guard | None
) -> float:
    if guard is not None:
        guard.before_forward(subject.constant_bytes, _UNLIMITED)
    loss = function(*subject.args, **subject.kwargs)
    if guard is not None:
        guard.after_forward()
    loss.backward()
    if guard is not None:
        guard.after_backward()
    subject.optimizer.step()
    return float(loss.detach())


def step_time(subject: Subject, function: Callable[..., torch.Tensor]) -> float:
    """Run forward and backward once; return the seconds of CPU time, or of device time on a GPU."""
    subject.model.zero_grad(set_to_none=True)
    gc.collect()
    if subject.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(subject.device)
        start.record(stream)
        function(*subject.args, **subject.kwargs).backward()
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.process_time()
    function(*subject.args, **subject.kwargs).backward()
    return time.process_time() - began


def differing_parts(eager: TrainingRecord, planned: TrainingRecord) -> tuple[str, ...]:
    """Return the losses, gradients, parameters and buffers that differ in any bit."""
    found: dict[str, None] = {}
    for index, (a, b) in enumerate(zip(eager.losses, planned.losses, strict=True)):
        if a != b and not (a != a and b != b):
            found[f"loss of step {index + 1}"] = None
    for index, (a, b) in enumerate(zip(eager.digests, planned.digests, strict=True)):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                found.setdefault(f"{key} (first in step {index + 1})")
    return tuple(found)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest magnitude of its kind.

    A tensor that only one of the two has differs without limit.
    """
    if a.keys() != b.keys():
        return math.inf
    largest = 0.0
    scale: dict[str, float] = {}
    for key, tensor in a.items():
        kind = key.split()[0]
        if tensor.is_floating_point() and tensor.numel():
            scale[kind] = max(scale.get(kind, 0.0), float(_dense(tensor).abs().max()))
    for key, tensor in a.items():
        if tensor.is_floating_point() and tensor.numel():
            difference = float((_dense(tensor) - _dense(b[key])).abs().max())
            largest = max(largest, difference / (scale[key.split()[0]] or 1.0))
    return largest


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
