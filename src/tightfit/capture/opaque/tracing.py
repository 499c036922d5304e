"""Opaque modules while a step is traced: each call is a single op of the step.

While a step is traced, a function takes the place of such a module's forward. It runs the module
for real, on tensors of the right shapes, and sees the outputs and saved tensors of the module. The
trace gets two operators with just those sizes: its forward and its backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.calls.structure import flatten
from tightfit.capture.opaque.call import CallMode, OpaqueArguments, OpaqueCall, OpaqueModules
from tightfit.capture.opaque.mark import is_marked, opaque_modules
from tightfit.capture.opaque.needs import naming_its_needs
from tightfit.capture.opaque.ops import OpaqueBackward, OpaqueForward
from tightfit.capture.opaque.record import TENSOR, Operand, Profile
from tightfit.capture.opaque.recurrent import (
    OfGivenWeights,
    RecurrentLayers,
    can_be_cut,
    takes_computed_weights,
)
from tightfit.capture.side_effects.forwards import SwappedForwards
from tightfit.capture.side_effects.members import parameters_and_buffers
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private
from tightfit.torch_private.recurrent import weights_of

_CALLS: weakref.WeakValueDictionary[int, OpaqueCall] = weakref.WeakValueDictionary()
_KEYS = itertools.count()

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_TAGS = (torch.Tag.nondeterministic_seeded,)  # they must not be run to learn a value
_LIBRARY.define("opaque_forward(Tensor[] tensors, int key) -> Tensor[]", tags=_TAGS)
_LIBRARY.define(
    "opaque_backward(Tensor record, Tensor[] saved, Tensor[] tangents, int[] present, int key) "
    "-> Tensor[]",
    tags=_TAGS,
)
_FORWARD = torch.ops.tightfit.opaque_forward.default
_BACKWARD = torch.ops.tightfit.opaque_backward.default


class OpaqueStandIns:
    """Replaces the opaque modules while a step is traced; keeps the calls it makes.

    `look_up`: returns the value of a traced tensor, if it follows from inputs and buffers alone;
    else None.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        look_up: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> None:
        self._modules = opaque_modules(modules)
        self._look_up = look_up
        self._made: dict[Any, OpaqueCall] = {}
        self._members = {n: parameters_and_buffers(m) for n, m in self._modules.items()}
        self._trained = {
            name: [n for n, p in m.named_parameters() if p.requires_grad]
            for name, m in self._modules.items()
        }
        self._layers = {
            name: RecurrentLayers(m)
            for name, m in self._modules.items()
            if can_be_cut(m) and not is_marked(m)
        }
        for name, cut in self._layers.items():
            for number, layer in enumerate(cut.layers):
                own = dict(layer.named_parameters())
                self._members[_layer_name(name, number)] = own
                self._trained[_layer_name(name, number)] = list(own)
        self._computed = {n for n, m in self._modules.items() if takes_computed_weights(m)}
        for name in self._computed:  # weights come as arguments
            self._members[name], self._trained[name] = {}, []
        self._forwards = SwappedForwards()
        self._examples: dict[int, tuple[Any, torch.Tensor]] = {}
        self._called: list[str] = []
        self._caches_casts = torch.is_autocast_cache_enabled()  # off while a step is traced
        self._tied = _sharing(modules, self._modules)

    def __enter__(self) -> OpaqueStandIns:
        for name, module in self._modules.items():
            parameters = functools.partial(_parameters_of, module)
            forward = self._stand_in(name, module, module.forward, parameters)
            if name in self._layers:
                forward = self._layer_by_layer(name, forward)
            if name in self._computed:
                forward = self._given_weights(name, module)
            self._forwards.swap(module, forward)
        return self

    def _given_weights(self, name: str, module: Any) -> Callable[..., Any]:
        """Return a forward of a recurrent module whose call is given the weights of now."""
        of_given = OfGivenWeights(module)
        call = self._stand_in(name, of_given, of_given.forward, dict)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(weights_of(module), *args, **kwargs)

        return forward

    def _layer_by_layer(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward of a recurrent module in which each layer is a call of its own."""
        cut = self._layers[name]
        for number, layer in enumerate(cut.layers):
            parameters = functools.partial(cut.parameters_now, number)
            forward = self._stand_in(_layer_name(name, number), layer, layer.forward, parameters)
            self._forwards.swap(layer, forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = cut.forward if cut.follows(*args, **kwargs) else whole
            return run(*args, **kwargs)

        return forward

    def __exit__(self, *_: Any) -> None:
        self._forwards.put_back()
        self._forget_handed_out()
        self._examples.clear()

    def found(self) -> OpaqueModules:
        """Return the facts of a traced step about the opaque modules it calls."""
        profiles = [call.profile for call in self._made.values()]
        changes_state = any(profile is None or profile.pinned for profile in profiles)
        return OpaqueModules(tuple(self._made.values()), changes_state)

    def note_inputs(self, traced: Any, real: Any) -> None:
        """Remember the real tensor of each traced input of the call."""
        self._called = []
        self._forget_handed_out()
        pairs = zip(flatten(traced)[0], flatten(real)[0], strict=True)
        self._examples = {
            id(t): (t, r)
            for t, r in pairs
            if isinstance(t, torch.Tensor) and not isinstance(r, private.FakeTensor)
        }

    def _stand_in(
        self,
        name: str,
        module: nn.Module,
        function: Callable[..., Any],
        parameters: Callable[[], Mapping[str, Any]],
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = flatten((args, kwargs))
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            now = parameters()
            tensors += [now[n] for n in self._trained[name]]
            call = self._call(name, module, function, leaves, spec, tensors)
            outputs = _Boundary.apply(call, *tensors)
            assert call.profile is not None
            _hand_out(call, tensors, outputs)
            return call.profile.filled(tensors, outputs)

        return forward

    def note_overwritten(self) -> None:
        """Note of which outputs that may be an input one of both was changed by now."""
        for call in self._made.values():
            call.seen.look_at_handed_out()

    def _forget_handed_out(self) -> None:
        for call in self._made.values():
            call.seen.forget_handed_out()

    def _call(
        self,
        name: str,
        module: nn.Module,
        function: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        tensors: list[torch.Tensor],
    ) -> OpaqueCall:
        casts = private.autocast_dtypes()
        if casts and torch.is_grad_enabled() and self._caches_casts:
            self._refuse_shared_casts(name)
        plain = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        geometries = tuple((Geometry.of(t), t.requires_grad) for t in tensors)
        grad = torch.is_grad_enabled()
        key = (name, repr(plain), str(spec), geometries, casts, grad)
        if key not in self._made:
            arguments = OpaqueArguments(tuple(self._operands(name, tensors)), plain, spec)
            number, mode = next(_KEYS), CallMode(casts, grad)
            call = OpaqueCall(number, name, module, function, arguments, mode)
            self._examine(call)
            _CALLS[number] = self._made[key] = call
        return self._made[key]

    def _refuse_shared_casts(self, name: str) -> None:
        """Refuse sums that eager makes in low precision: gradients of a cast with many readers."""
        self._called.append(name)
        if self._trained[name] and (self._called.count(name) > 1 or name in self._tied):
            raise CaptureError(
                f"the opaque module {name!r} is called several times, or shares parameters with "
                "others, under autocast: eager then adds up gradients in low precision, across "
                "code that tightfit cannot see into. Way out: call it once a step, use "
                "torch.autocast(..., cache_enabled=False), or do not mark it",
                module=name,
            )

    def _operands(self, name: str, tensors: list[torch.Tensor]) -> list[Operand]:
        trained = self._trained[name]
        arguments = tensors[: len(tensors) - len(trained)]
        operands = []
        for tensor in arguments:
            _, example = self._examples.get(id(tensor), (None, None))
            if example is None and not tensor.is_floating_point():
                example = self._look_up(tensor)
            operands.append(Operand(Geometry.of(tensor), tensor.requires_grad, None, example))
        for parameter in trained:
            real = self._members[name][parameter]
            operands.append(Operand(Geometry.of(real), True, parameter, real))
        return operands

    def _examine(self, call: OpaqueCall) -> None:
        state = self._members[call.name]
        if any(isinstance(t, private.FakeTensor) or t.is_meta for t in state.values()):
            raise CaptureError(
                f"the opaque module {call.title!r} must run once to be measured, but here there "
                "are only shapes: use real parameters and inputs"
            )
        with private.without_modes(), naming_its_needs(call):
            call.examine(state)


def _hand_out(
    call: OpaqueCall, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Remember which outputs of a traced call may be an input in another run."""
    assert call.profile is not None
    places = [k for k, place in enumerate(call.profile.passed) if place is None]
    for k, output in zip(places, outputs, strict=True):
        for tensor, operand in zip(tensors, call.operands, strict=True):
            alike = operand.geometry == Geometry.of(output)
            if alike and operand.parameter is None and not operand.requires_grad:
                call.seen.hands_out(k, tensor, output)


def _parameters_of(module: nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters(remove_duplicate=False))


def _layer_name(name: str, number: int) -> str:
    return f"{name}.layer{number}".lstrip(".")


def _sharing(modules: Mapping[str, nn.Module], opaque: Mapping[str, nn.Module]) -> set[str]:
    """Return the opaque modules with a parameter that is also used outside of them."""
    uses = _uses_of_parameters(modules.values())
    inside = {name: _uses_of_parameters([module]) for name, module in opaque.items()}
    return {name for name, own in inside.items() if any(uses[key] > own[key] for key in own)}


def _uses_of_parameters(modules: Iterable[nn.Module]) -> Counter[int]:
    named = (module.named_parameters(remove_duplicate=False) for module in modules)
    return Counter(id(parameter) for each in named for _, parameter in each)


class _Boundary(torch.autograd.Function):
    """Puts the two operators of a call into the trace."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        profile = call.profile
        assert profile is not None
        results = _FORWARD(list(tensors), call.key)
        outputs = results[: len(profile.outputs)]
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.has_record:
            known = [*tensors, *outputs]
            ctx.save_for_backward(results[-1], *(known[i] for i in profile.saved))
        fixed = [t for t, flag in zip(outputs, profile.differentiable, strict=True) if not flag]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        call: OpaqueCall = ctx.call
        record, *saved = ctx.saved_tensors
        present = tuple(i for i, t in enumerate(tangents) if t is not None)
        given = [t for t in tangents if t is not None]
        given_geometries = [Geometry.of(t) for t in given]
        with private.without_modes(), naming_its_needs(call):
            geometries = call.examine_backward(present, given_geometries)
        found = iter(_BACKWARD(record, saved, given, list(present), call.key))
        made = iter(geometries)
        gradients = [
            next(found) if o.requires_grad and next(made) is not None else None
            for o in call.operands
        ]
        return (None, *gradients)


@torch.library.register_fake("tightfit::opaque_forward")
def _fake_forward(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    call = _CALLS[key]
    assert call.profile is not None
    outputs = [geometry.empty() for geometry in call.profile.outputs]
    if call.has_record:
        size = call.profile.record_bytes
        outputs.append(torch.empty(size, dtype=torch.uint8, device=call.device))
    return outputs


@torch.library.register_fake("tightfit::opaque_backward")
def _fake_backward(
    record: torch.Tensor,
    saved: list[torch.Tensor],
    tangents: list[torch.Tensor],
    present: list[int],
    key: int,
) -> list[torch.Tensor]:
    geometries = _CALLS[key].backwards[tuple(present)].gradients
    return [geometry.empty() for geometry in geometries if geometry is not None]


def opaque_function(node: fx.Node) -> tuple[OpaqueForward | OpaqueBackward, tuple[Any, ...]] | None:
    """Return the function of a traced opaque operator in a program, with its arguments."""
    if node.target not in (_FORWARD, _BACKWARD):
        return None
    call = _CALLS[node.args[-1]]  # type: ignore[index]
    if node.target is _FORWARD:
        return OpaqueForward(call), (node.args[0],)
    record, saved, tangents, present, *sums, _ = node.args
    added, before = sums or ((), [])
    earlier = tuple(Geometry.of(node.meta["val"]) for node in before)
    run = OpaqueBackward(call, tuple(present), tuple(added), earlier)  # type: ignore[arg-type]
    return run, (record, saved, tangents, before)


def _profile_of(node: fx.Node) -> Profile | None:
    """Return the profile of the opaque forward that a traced operator runs; None: it runs none."""
    return _CALLS[node.args[-1]].profile if node.target is _FORWARD else None  # type: ignore


def is_record(node: fx.Node, index: int) -> bool:
    """Whether an opaque forward keeps an output of a traced operator for its backward."""
    profile = _profile_of(node)
    return profile is not None and index == len(profile.outputs)


def is_opaque_backward(node: fx.Node) -> bool:
    """Whether a traced operator is the backward of an opaque module."""
    return node.target is _BACKWARD


def with_sums(node: fx.Node, before: Mapping[int, fx.Node]) -> None:
    """Let the backward of an opaque module add its results to others.

    `before`: by its results: gradients of others for the same tensor.
    """
    *given, key = node.args
    node.args = (*given[:4], tuple(before), list(before.values()), key)


def is_opaque_operator(node: fx.Node) -> bool:
    """Whether a traced operator is the forward or the backward of an opaque module."""
    return node.target in (_FORWARD, _BACKWARD)


def draws_inside(node: fx.Node) -> bool:
    """Whether a traced operator is the forward of an opaque module that draws random numbers."""
    profile = _profile_of(node)
    return profile is not None and profile.random


def pin_of(node: fx.Node) -> str | None:
    """Return why a traced opaque operator may not run twice, if it may not."""
    if node.target is _BACKWARD:
        return "frees the tensors its forward kept for it"
    profile = _profile_of(node)
    return profile.pinned if profile is not None else None
