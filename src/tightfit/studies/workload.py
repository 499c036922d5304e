"""A model with a batch and an optimizer, which training starts from the same state each time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.allocator.resident import is_part, resident_tensor_bytes
from tightfit.capture.calls.structure import flatten, unflatten
from tightfit.errors import NothingToTrain
from tightfit.execution.attach import attached, detach
from tightfit.session.callee import Callee
from tightfit.session.handles import PlannedStep, fitted_of
from tightfit.session.memory.account import Account
from tightfit.studies.bits import digest_of, is_zero
from tightfit.studies.model import loss_function, model_inputs
from tightfit.torch_private.core import storage_key
from tightfit.zoo import Example


class Workload:
    """A model with a batch and an optimizer; `reset` restores its first state.

    ``loss_of(*args, **kwargs)`` computes its loss.

    `example`: its model may be a step (see `with_loss_inside`), planned or not. A model that the
    factory has fitted is unfitted. `seed`: of every random number drawn in training.
    `model_inputs`: positional and keyword inputs of the model or the step; the loss may read
    others. `loss_is_outside`: whether the loss is computed from outputs of the model or the step.
    """

    def __init__(self, example: Example, seed: int) -> None:
        self.step = _unfitted_callee(example.model)
        if self.step is None:
            self.model: nn.Module = example.model
            computed = example.model, type(example.model).__name__
        else:
            self.model, self._runs = _common_module(self.step.modules), self.step.function
            computed = self._run_step, self.step.name
        self.loss_of, self.args, self.kwargs = loss_function(example, *computed)
        self.model_inputs = model_inputs(example)
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
        """Run a planned step instead of the plain one within this context."""
        before, self._runs = self._runs, step
        try:
            yield
        finally:
            self._runs = before

    def make_new_batch(self) -> None:
        """Allocate inputs and the target again, as a loop makes its batches after `fit`.

        Memory allocated before `fit` counts against no budget. Tensors stay that share memory, or
        have other strides than a copy of them.
        """
        leaves, structure = flatten((self.args, self.kwargs, self.model_inputs))
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
        self.args, self.kwargs, self.model_inputs = new

    def has_trained(self) -> bool:
        """Whether a parameter differs from the first state, or has a gradient other than zero."""
        return any(
            not torch.equal(parameter, self.initial.get(name, parameter))
            or (parameter.grad is not None and not is_zero(parameter.grad))
            for name, parameter in self.model.named_parameters()
        )

    def reset(self) -> None:
        """Restore parameters, buffers and inputs; drop gradients and optimizer state."""
        self.model.load_state_dict(self.initial)
        with torch.no_grad():
            for index, (leaf, version, value) in enumerate(self._inputs):
                if leaf._version != version:  # the forward writes into it
                    leaf.copy_(value)
                    self._inputs[index] = leaf, leaf._version, value
        self.model.zero_grad(set_to_none=True)
        self.optimizer.state.clear()

    def constant_bytes(self) -> int:
        """Return the bytes of parameters, buffers, inputs, gradients and optimizer state."""
        leaves = flatten((self.args, self.kwargs))[0]
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        held = resident_tensor_bytes(inputs, self._account.granularity_bytes)
        return held + self._account.lasting_bytes()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return gradients, parameters and buffers by name, not copied."""
        found = {f"gradient of {k}": p.grad for k, p in self.model.named_parameters()}
        found |= {f"parameter {k}": p.detach() for k, p in self.model.named_parameters()}
        found |= {f"buffer {k}": b for k, b in self.model.named_buffers()}
        return {k: t for k, t in found.items() if t is not None}

    def digests(self) -> dict[str, bytes]:
        """Return a hash of the bits of each of `tensors`."""
        return {key: digest_of(tensor) for key, tensor in self.tensors().items() if tensor.numel()}


def _unfitted_callee(model: Any) -> Callee | None:
    """Unfit a model or a step, which ends its budget; return the callable of a step."""
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
    """Return an example whose model is a step that computes model and loss in one plan."""
    loss_of, args, kwargs = loss_function(example)

    def step(*inputs: Any) -> torch.Tensor:
        return loss_of(*inputs[: len(args)], **dict(zip(kwargs, inputs[len(args) :], strict=True)))

    callee = Callee(step, {"model": example.model}, loss_of.__name__)
    return Example(callee, None, (*args, *kwargs.values()), None)


def _common_module(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that contains those of a step."""
    if len(modules) == 1:
        return next(iter(modules.values()))
    parent = nn.Module()
    for name, module in modules.items():
        parent.add_module(name.replace(".", "_"), module)
    return parent
