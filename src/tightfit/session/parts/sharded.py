"""Models whose parameters FSDP2 (`fully_shard`) spreads over processes: their units are planned."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.allocator import meter_for
from tightfit.capture.calls.signature import input_signature
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.captured import Captured
from tightfit.capture.handed import HandedGraph
from tightfit.capture.traced_call import TracedCall
from tightfit.dynamo.backend import handing_over_to
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.dynamo.outside import Outside
from tightfit.errors import BadInput
from tightfit.execution.attach import attach_part, detach, original_forward
from tightfit.session.callee import Callee
from tightfit.session.memory.account import Account
from tightfit.session.memory.devices import library_bytes
from tightfit.session.options import Options, with_ranks
from tightfit.session.parts.kinds import Part
from tightfit.session.parts.planning import PartsSettings
from tightfit.session.parts.route import PartsRoute
from tightfit.session.parts.steps import PartSteps
from tightfit.session.processes import Ranks
from tightfit.session.stages import capture_step


class ShardedModel(PartsRoute):
    """Runs a model whose sharded modules are planned, each by itself.

    `parts`: by name, none inside another. `options`, `account`: the user's, and the model's memory
    between steps. `group`: the processes that train the model together. `late_bytes`: the part of
    the budget that plans leave unused for memory that other threads free in their own time.
    """

    def __init__(
        self,
        callee: Callee,
        parts: Mapping[str, nn.Module],
        options: Options,
        account: Account,
        *,
        group: Any = None,
        late_bytes: int = 0,
    ) -> None:
        _refuse_options(options)
        if group is not None:
            options = with_ranks(options, Ranks(group))
        self.callee = callee
        steps = PartSteps(
            callee.name,
            options,
            str(account.device),
            _Metered(account),
            self._capture,
            PartsSettings(late_bytes),
        )
        super().__init__(options, steps, Outside(callee.name, callee.modules))
        follower = Following(callee.modules, self.outside, account)
        classes = Counter(map(type, parts.values()))
        self.parts: list[_Unit] = []
        for name, m in parts.items():
            part = Part(name, {"part": m}, alike=classes[type(m)], is_gathered=True)
            self.parts.append(_Unit(part, self.steps, original_forward(m), follower))

    def attach_parts(self) -> None:
        """Replace the forwards of the parts."""
        for part in self.parts:
            if part.module is not self.callee.root:
                attach_part(part.module, part)

    def leave(self) -> None:
        """Give every part its own forward back."""
        for part in self.parts:
            if part.module is not self.callee.root:
                detach(part.module)

    def __call__(self, given: Arguments) -> Any:
        """Run the model; its parts run their plans."""
        self.steps.begin(input_signature(given.leaves, given.spec))
        own = next((part for part in self.parts if part.module is self.callee.root), None)
        if own is not None:
            return own(given.args, given.kwargs)
        return self.callee.function(*given.args, **given.kwargs)

    def _capture(self, call: TracedCall, name: str) -> Captured:
        return capture_step(call, self.options, name)

    def prepare(self, given: Arguments) -> None:
        """Refuse: parts are captured while the model runs."""
        raise BadInput(
            "parts are planned while the model takes its first step: train, then ask for "
            "tightfit.report(model)"
        )


class _Metered:
    """Memory of a sharded model: bytes it held when fitted, and bytes metered since."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._meter = meter_for(account.device)
        lasting = account.lasting_bytes() + library_bytes(account.device)
        self._base_bytes = lasting - self._meter.live_bytes()

    def resident_bytes(self) -> int:
        return self._base_bytes + self._meter.live_bytes()

    def coming_bytes(self) -> int:
        """Return nothing: state that will come is seen once it is there."""
        return 0

    def stepping_bytes(self) -> int:
        """Return nothing: memory of the optimizer's step is measured once it runs."""
        return 0

    def gradient_bytes(self) -> int:
        """Return nothing: it is measured what a step leaves."""
        return 0

    def rest(self) -> None:
        """End the step: its budget is for the code that follows."""
        self._account.rest()

    def name_budget(self, needed_bytes: int) -> bool:
        """Name none: processes run the same plans."""
        return False


class _Unit:
    """Replaces the forward of one sharded module, whose Python Dynamo follows."""

    def __init__(
        self, part: Part, steps: PartSteps, own: Callable[..., Any], follower: Following
    ) -> None:
        self._steps = steps
        self._part = part
        hand_over = handing_over_to(weakref.WeakMethod(self._called))
        self._compiled = Compiled(own, part.name, hand_over, follower)

    @property
    def module(self) -> nn.Module:
        return self._part.modules["part"]

    def is_of(self, module: nn.Module) -> bool:
        return self.module is module

    def leave(self) -> None:
        """Refuse: parts leave with the whole model."""
        raise BadInput(f"{self._part.name!r} is part of a fitted model: tightfit.unfit the model")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward of the module; its graphs run their plans."""
        return self._compiled(args, kwargs)

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        given = self._part.given(graph, inputs)
        call = self._steps.kind_of(self._part, given)
        return self._steps.run(self._part, call, given)


def sharded_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules that were given to `fully_shard`, by name; often none.

    Their parameters are gathered whole while their forward runs. A module around other such modules
    runs its own code eagerly.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    sharded = {n: m for n, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}
    return {
        name: module
        for name, module in sharded.items()
        if not any(isinstance(m, fsdp.FSDPModule) for m in module.modules() if m is not module)
    }


def group_of(model: nn.Module) -> Any:
    """Return the processes the parameters are spread over; None if it is one alone.

    Raises `BadInput` if only a part of the model was given: its root must be, for the step to be
    seen whole.
    """
    fsdp = sys.modules["torch.distributed.fsdp"]
    if not isinstance(model, fsdp.FSDPModule):
        raise BadInput(
            "parts of the model were given to fully_shard, but not the model itself: call "
            "fully_shard(model) too, then tightfit.fit(model, ...)"
        )
    group = torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def late_bytes(parts: dict[str, nn.Module]) -> int:
    """Return bytes that collectives on a CPU hold after they run: a part's gathered parameters.

    There threads of the process group free buffers; on a GPU the stream's order does.
    """
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in parts.values()]
    on_cpu = all(p.device.type == "cpu" for m in parts.values() for p in m.parameters())
    return max(sizes, default=0) if on_cpu else 0


def _refuse_options(options: Options) -> None:
    """Refuse options that are not supported part by part, and name them."""
    wanted = {
        "budget='device'": options.budget_bytes is None,
        "a shared Budget": options.shared is not None,
        "plan=": options.plan is not None,
        "compile=": options.compile,
        "in_flight=": options.in_flight not in (None, 1),
    }
    refused = [name for name, is_wanted in wanted.items() if is_wanted]
    if refused:
        raise BadInput(
            f"a model planned part by part takes no {', no '.join(refused)}: give a budget in "
            "bytes of its own, such as '8GiB', and leave the rest out"
        )
