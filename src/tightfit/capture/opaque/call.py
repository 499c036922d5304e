"""A module that runs eagerly as one op of a planned step: its forward, its backward, its bytes.

Inside, ordinary autograd runs. Its saved tensors are held by one record, which is one value of the
plan. The record dies when the plan frees it, and is made again when the plan computes the forward
again. Inputs and outputs that backward needs are not kept by the record but read again from the
plan's own values. So nothing is held twice or behind the plan's back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tightfit.allocator import measure_peak
from tightfit.allocator.devices import default_generator, fixed_generators
from tightfit.allocator.refusals import is_refusal
from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.calls.structure import structure_of, unflatten
from tightfit.capture.opaque.observations import observations_of
from tightfit.capture.opaque.record import (
    TENSOR,
    Anchor,
    Backward,
    Keeper,
    Operand,
    Profile,
    Record,
    Result,
)
from tightfit.capture.opaque.running import opaque_call
from tightfit.capture.restored.python_state import PythonState
from tightfit.capture.side_effects.members import members_of, write_replaced
from tightfit.errors import CaptureError, OpaqueChanged, PlanMismatch
from tightfit.torch_private import core as private
from tightfit.units import format_bytes

_DRAWS = 8
"""How many times a module that draws numbers is run to see whether they decide which code runs."""
_DRAWS_S = 1.0  # the time after which it is run no more


class _Body(nn.Module):
    """Gives a forward function of a module its parameters to swap."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = module
        object.__setattr__(self, "function", function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = members_of(self.inner)
        output = self.function(*args, **kwargs)
        write_replaced(self.inner, before)
        return output


@dataclass(frozen=True)
class OpaqueArguments:
    """The arguments of a call of an opaque module.

    `operands`: tensor arguments in order, then the parameters it trains. `leaves`, `spec`: the
    flattened arguments (None where a tensor is) and how they nest.
    """

    operands: tuple[Operand, ...]
    leaves: tuple[Any, ...]
    spec: Any


@dataclass(frozen=True)
class CallMode:
    """How an opaque module is called: under autocast or not, differentiated or not.

    `casts`: device types under autocast and the types that they are cast to.
    """

    casts: tuple[tuple[str, torch.dtype], ...]
    is_differentiated: bool


class OpaqueCall:
    """One opaque module, called with operands of given geometry.

    `name`: the module's name in the model. `function`: its own forward.
    """

    def __init__(
        self,
        key: int,
        name: str,
        module: nn.Module,
        function: Callable[..., Any],
        arguments: OpaqueArguments,
        mode: CallMode,
    ) -> None:
        operands = arguments.operands
        self.key = key
        self.name = name
        self.title = name or type(module).__name__  # in messages: the model itself has no name
        self.module = module
        self.body = _Body(module, function)
        self.operands = operands
        self.leaves = arguments.leaves
        self.spec = arguments.spec
        self.casts = mode.casts
        self.has_record = mode.is_differentiated and any(o.requires_grad for o in operands)
        self.profile: Profile | None = None
        self.seen = observations_of(module, tuple((o.geometry, o.requires_grad) for o in operands))
        self.draws: tuple[int, ...] = (0,)  # seeds; several where they decide which code runs
        self.state: dict[str, torch.Tensor] = {}
        self.backwards: dict[tuple[int, ...], Backward] = {}  # by the outputs with a gradient

    def forget_examples(self) -> None:
        """Free the tensors it was measured with: they would live as long as the plan."""
        self.operands = tuple(
            o if o.parameter is not None else replace(o, example=None) for o in self.operands
        )

    # -- running ------------------------------------------------------------------------------

    def forward(
        self, tensors: Sequence[torch.Tensor], state: dict[str, torch.Tensor] | None = None
    ) -> Result:
        """Run the module on its operands, with other parameters and buffers if given."""
        anchor = torch.empty(0, requires_grad=True)
        versions = [t._version for t in tensors]
        keeper = Keeper()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.has_record))
            for device, dtype in self.casts:
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(_flat_weights_kept(self.module))
            stack.enter_context(opaque_call())
            if self.has_record:
                hooks = torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack)
                stack.enter_context(hooks)
            sources = [
                self._source(o, t, anchor) for o, t in zip(self.operands, tensors, strict=True)
            ]
            output = self._call(sources, state or {})
            leaves, structure = structure_of(output, f"the opaque module {self.title!r}")
            place = {id(t): i for i, t in enumerate(sources) if t is tensors[i]}
            passed = tuple(
                None if k in self.seen.new else place.get(id(leaf)) for k, leaf in enumerate(leaves)
            )
            self.seen.refuse_copies(self.name, [k for k, x in enumerate(leaves) if id(x) in place])
            leaves = [x for x, i in zip(leaves, passed, strict=True) if i is None]
            others = [*tensors, *(state or {}).values(), *_members(self.module)]
            outputs = _own(leaves, others)
        if any(t._version != v for t, v in zip(tensors, versions, strict=True)):
            raise CaptureError(
                f"the opaque module {self.title!r} writes over one of its inputs, which others may "
                "read: let it clone the input first",
                module=self.name,
            )
        flags = tuple(t.requires_grad for t in outputs)
        record = None
        if self.has_record:
            record = self._record(keeper, sources, outputs, tensors, state or {})
        return Result(tuple(t.detach() for t in outputs), record, flags, structure, passed)

    def _source(self, operand: Operand, tensor: torch.Tensor, anchor: torch.Tensor) -> Any:
        if not (operand.requires_grad and self.has_record):
            return tensor
        if operand.parameter is not None:  # a leaf, as in eager: autocast casts a leaf only once
            return tensor.detach().requires_grad_()
        return Anchor.apply(anchor, tensor)

    def _call(self, sources: Sequence[Any], state: dict[str, torch.Tensor]) -> Any:
        arguments = iter(sources)
        leaves = [next(arguments) if leaf is TENSOR else leaf for leaf in self.leaves]
        names = [o.parameter for o in self.operands if o.parameter is not None]
        swapped = {f"inner.{n}": t for n, t in zip(names, arguments, strict=True)}
        swapped |= {f"inner.{n}": t for n, t in state.items() if n not in names}
        args, kwargs = unflatten(leaves, self.spec)
        return torch.func.functional_call(self.body, swapped, args, kwargs)

    def _record(
        self,
        keeper: Keeper,
        sources: Sequence[Any],
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        state: Mapping[str, torch.Tensor],
    ) -> Record:
        edge = torch.autograd.graph.get_gradient_edge
        known = [*tensors, *outputs]
        allowed = None if self.profile is None else self.profile.saved
        chosen = keeper.refer(known, allowed)
        if self.profile is not None:
            # statistics, say, that took the place of the module's own
            resident = self._resident() | _storages(state.values())
            self._refuse_growth(keeper.held_bytes(resident), self.profile)
        keeper.finish()
        return Record(
            keeper,
            tuple(
                edge(s)
                for s, o in zip(sources, self.operands, strict=True)
                if o.requires_grad and s.requires_grad
            ),
            tuple(edge(t) if t.requires_grad else None for t in outputs),
            tuple(chosen),
            tuple(known[i].storage_offset() * known[i].element_size() for i in chosen),
        )

    def _refuse_growth(self, held_bytes: int, profile: Profile) -> None:
        if held_bytes > profile.record_bytes:
            self.seen.keeps(held_bytes)
            raise OpaqueChanged(
                f"the opaque module {self.title!r} kept {format_bytes(held_bytes)} for its backward"
                f", but {format_bytes(profile.record_bytes)} when it was measured: its saved "
                "tensors depend on the data. The plan is dropped; run the step again and a plan "
                "with this much room is made"
            )

    def _resident(self) -> set[int]:
        """Return the storages of the module's members; a trace has stand-ins in their places."""
        return _storages((*_members(self.module), *self.state.values()))

    def backward(
        self,
        record: Record,
        saved: Sequence[torch.Tensor],
        tangents: Sequence[torch.Tensor],
        present: Sequence[int],
        *,
        retain: bool = False,
        sums: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ) -> list[torch.Tensor | None]:
        """Return the gradient of every operand that requires a gradient, or None where it has none.

        Each is added to an earlier gradient from outside, which `sums` has by its place among them.
        """
        results = [record.results[i] for i in present]
        results += [record.sources[i] for i in sums]  # gradients that come in there are added to
        given = [*tangents, *sums.values()]
        with record.keeper.bound(saved, record.offsets_bytes):
            gradients = torch.autograd.grad(
                results, record.sources, given, allow_unused=True, retain_graph=retain
            )
        taken = {private.storage_key(t) for t in (*saved, *given) if t.numel()}
        taken |= self._resident()
        owned: list[torch.Tensor | None] = []
        for gradient in gradients:
            if gradient is None or not gradient.numel():
                owned.append(gradient)
                continue
            shared = private.storage_key(gradient) in taken
            own = gradient.clone() if shared else gradient
            taken.add(private.storage_key(own))
            owned.append(own)
        return owned

    # -- measuring ----------------------------------------------------------------------------

    def examine(self, state: dict[str, torch.Tensor]) -> None:
        """Run the forward on real tensors, measure it, change nothing.

        `state`: the module's real parameters and buffers.
        """
        self.state = state
        self.operands = _given(self.operands, self.seen.take_given())
        tensors = [o.real() for o in self.operands]
        buffers = {n for n, _ in self.module.named_buffers(remove_duplicate=False)}
        copies = {n: t.clone() if n in buffers else t for n, t in state.items()}
        versions = {n: t._version for n, t in copies.items()}
        python = PythonState(self.module)
        with fixed_generators(self.device), python:
            generator = torch.get_rng_state()
            result = _explained(self, tensors, copies)
            if not torch.equal(generator, torch.get_rng_state()):
                result = _with_fresh_draws(self, result, tensors, copies)
            outputs = tuple(Geometry.of(t) for t in result.outputs)
            drew = not torch.equal(generator, torch.get_rng_state())
            self.seen.makes(result.new)
            result = replace(result, record=None, outputs=())
            del tensors  # further runs replace this run
            kept = self._kept(result, copies, drew) if self.has_record else {}
        self.draws = tuple(kept)[: None if len({*kept.values()}) > 1 else 1] or (0,)
        changed = [n for n in copies if n in buffers and copies[n]._version != versions[n]]
        changed += [*python.changed, *_changed_by_cudnn(self)]
        self.profile = Profile(
            outputs=outputs,
            differentiable=result.differentiable,
            structure=result.structure,
            passed=result.passed,
            saved=tuple(sorted({index for saved, _ in kept.values() for index in saved})),
            record_bytes=max(0, self.seen.kept_bytes, *(held for _, held in kept.values())),
            # another branch may draw where this branch did not
            random=drew or not isinstance(self.module, nn.RNNBase),
            changed=tuple(changed),
        )

    def seed(self, seed: int) -> None:
        """Let the next run draw as all runs of this seed; for use where generators are put back."""
        torch.default_generator.manual_seed(seed)
        default_generator(self.device).manual_seed(seed)

    def _kept(
        self, expected: Result, copies: dict[str, torch.Tensor], drew: bool
    ) -> dict[int, tuple[tuple[int, ...], int]]:
        """Return by seed the bytes that backward reads, and others that live on.

        These exist when a forward has ended and its inputs and outputs are gone. Draws with which
        it returns other outputs than expected, which no plan allows, are left out.
        """
        found: dict[int, tuple[tuple[int, ...], int]] = {}
        others: dict[int, tuple[tuple[int, ...], int]] = {}
        begin = time.perf_counter()
        for seed in range(_DRAWS if drew and not isinstance(self.module, nn.RNNBase) else 1):
            alike: list[bool] = []

            def only_the_record(seed: int = seed, alike: list[bool] = alike) -> Any:
                self.seed(seed)
                tensors = [
                    o.real().clone() if o.parameter is None else o.real() for o in self.operands
                ]
                result = self.forward(tensors, copies)
                alike.append(result.is_like(expected))
                return result.record

            record, peak = measure_peak(only_the_record, device=self.device)
            kept = found if all(alike) else others
            kept[seed] = record.saved, max(0, peak.growth_bytes)
            del record
            if time.perf_counter() - begin > _DRAWS_S:
                break
        return found or others

    @property
    def device(self) -> torch.device:
        return next((o.geometry.device for o in self.operands), torch.device("cpu"))

    def examine_backward(
        self, present: tuple[int, ...], tangents: Sequence[Geometry]
    ) -> tuple[Geometry | None, ...]:
        """Find the layouts of the gradients, given those of the outputs' gradients.

        Kernels copy a gradient whose layout they cannot use: that takes memory.
        """
        if present not in self.backwards:
            self.backwards[present] = Backward(tuple(tangents))
            with fixed_generators(self.device), PythonState(self.module):
                record, saved, given = self.ready(present, self.state)
                gradients = self.backward(record, saved, given, present)
            operands = [o for o in self.operands if o.requires_grad]
            found = tuple(
                Geometry.of(g) if g is not None else (o.geometry if o.parameter else None)
                for o, g in zip(operands, gradients, strict=True)
            )
            self.backwards[present] = Backward(tuple(tangents), found)
        return self.backwards[present].gradients

    def ready(
        self, present: Sequence[int], state: dict[str, torch.Tensor] | None = None
    ) -> tuple[Record, list[torch.Tensor], list[torch.Tensor]]:
        """Run a forward for a backward to be measured: its record, its inputs, tangents."""
        assert self.profile is not None
        if state is None:
            state = dict(self.module.named_buffers())
        names = {n for n, _ in self.module.named_buffers(remove_duplicate=False)}
        state = {n: t.clone() if n in names else t for n, t in state.items()}
        tensors = [o.real() for o in self.operands]
        result = self.forward(tensors, state)
        assert result.record is not None
        known = [*tensors, *result.outputs]
        saved = [known[i] for i in self.profile.saved]
        geometries = self.backwards[tuple(present)].tangents
        tangents = [geometry.materialised() for geometry in geometries]
        return result.record, saved, tangents


@dataclass(frozen=True)
class OpaqueModules:
    """The opaque modules of a captured step."""

    calls: tuple[OpaqueCall, ...]  # kept here: the step's operators know them by their keys only
    changes_state: bool  # whether any changes buffers or Python state when it runs

    def forget_examples(self) -> None:
        """Free the tensors they were measured with, once the step is priced."""
        for call in self.calls:
            call.forget_examples()


def _own(leaves: Sequence[Any], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, copied where they share a storage with tensors elsewhere."""
    taken = {private.storage_key(t) for t in others if t.numel()}
    outputs: list[torch.Tensor] = []
    for leaf in leaves:
        shared = leaf.numel() and private.storage_key(leaf) in taken
        outputs.append(leaf.clone() if shared else leaf)
        taken.add(private.storage_key(outputs[-1]))
    return outputs


def _members(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {private.storage_key(t) for t in tensors if t.numel()}


@contextlib.contextmanager
def _flat_weights_kept(module: nn.Module) -> Iterator[None]:
    """Put back the lists of weights that recurrent modules make from the weights they run with."""
    recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    names = ("_flat_weights", "_flat_weight_refs")
    kept = [{n: m.__dict__[n] for n in names if n in m.__dict__} for m in recurrent]
    try:
        yield
    finally:
        for each, attributes in zip(recurrent, kept, strict=True):
            each.__dict__.update(attributes)


def _explained(
    call: OpaqueCall, tensors: list[torch.Tensor], state: dict[str, torch.Tensor]
) -> Result:
    """Run a call to look at it; say so where it fails."""
    try:
        return call.forward(tensors, state)
    except (CaptureError, PlanMismatch):
        raise
    except Exception as error:
        if is_refusal(error):
            raise
        raise CaptureError(
            f"the opaque module {call.title!r} fails when it is run by itself to be measured: "
            f"{type(error).__name__}: {str(error)[:300]}. It gets tensors of the shapes of "
            "this step; values are those of the call only where an input of the call goes "
            "straight into it",
            module=call.name,
        ) from error


def _given(operands: Sequence[Operand], tensors: Sequence[torch.Tensor]) -> tuple[Operand, ...]:
    """Return operands to be measured with inputs of the module in a step, if known."""
    given = iter(tensors)
    return tuple(
        replace(o, example=next(given, o.example)) if o.parameter is None else o for o in operands
    )


def _with_fresh_draws(
    call: OpaqueCall, result: Result, tensors: list[torch.Tensor], state: dict[str, torch.Tensor]
) -> Result:
    """Return a run in which no output is an input that another draw makes again."""
    if all(place is None for place in result.passed):
        return result
    begin = time.perf_counter()
    for seed in range(_DRAWS):
        call.seed(seed)
        other = call.forward(tensors, state)
        if len(other.passed) == len(result.passed):
            call.seen.makes(other.new)
        if time.perf_counter() - begin > _DRAWS_S:
            break
    return call.forward(tensors, state) if call.seen.new else result


def _changed_by_cudnn(call: OpaqueCall) -> list[str]:
    """Name the generator from which cuDNN draws the dropout of recurrent modules, if it does."""
    if call.device.type == "cuda" and torch.backends.cudnn.enabled:
        for module in call.module.modules():
            drops = isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
            if drops and module.training:
                return ["the state of cuDNN's dropout, which cannot be restored,"]
    return []
