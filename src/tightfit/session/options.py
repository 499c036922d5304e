"""The options of `fit` and `step`, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tightfit.allocator.tally import Tally
from tightfit.capture.calls.structure import Arguments, flatten, unflatten
from tightfit.costs import refuse_unknown_costs
from tightfit.errors import BadInput
from tightfit.execution.far.links import operator_threads, refuse_without_file
from tightfit.execution.far.memory import FarMemory
from tightfit.execution.far.offload import Offload
from tightfit.graph.ir import EXACTNESS, Exactness
from tightfit.plan.plan import Far, Plan
from tightfit.planners.base import Limits
from tightfit.planners.registry import DEFAULT, find_planner
from tightfit.progress import SILENT, Progress, announce
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Budget, usable_bytes
from tightfit.session.memory.devices import device_of_modules
from tightfit.session.memory.in_backward import StepsInBackward
from tightfit.session.processes import Ranks
from tightfit.units import format_bytes, parse_bytes

USUAL_LIMITS = Limits(seconds=10.0)
"""Of a search, where the user says nothing else."""


@dataclass(frozen=True)
class Options:
    """The checked keywords of `fit` and `step`."""

    budget_bytes: int | None  # the limit; None: free memory of the device, minus the reserve
    reserve_bytes: int = 0  # bytes of the budget left unused
    planner: str = DEFAULT  # name in the registry
    limits: Limits = USUAL_LIMITS  # when the planner stops
    plan: Plan | None = None  # a plan to use instead of planning, if it fits the captured graph
    costs: str = "measured"  # ``"measured"``, or modelled: a name of `COST_SOURCES`
    # The action of the guard when a step exceeds the budget
    on_exceed: Literal["raise", "warn"] = "raise"
    # How many planned forwards may await their backward at once; None: found out
    in_flight: int | None = None
    optimizer: Any = None  # from which the size of its state follows
    cache: bool = True  # whether plans and costs from steps are kept on disk for the next process
    progress: Progress = field(default=SILENT)
    shared: Budget | None = None  # the budget that this callable shares with others
    # Whether further calls will share the budget that were not seen yet: graphs after a break
    others_to_come: bool = False
    ranks: Ranks | None = None  # the processes that train the same model, once they are known
    compile: bool = False  # whether planned programs are compiled by Inductor
    # Whether Ctrl-C during planning stops the program; else the best plan so far is taken
    stops_on_interrupt: bool = True
    arena: bool = False  # whether the memory of a step is at planned addresses
    # Left by plans for memory of the process other than tensors; known in an arena
    left_bytes: int = 0
    # How exact operators have to be that a plan may choose instead of eager's
    exactness: Exactness = "bitwise"
    # Takes the optimizer's steps inside of plans; None: the loop takes them
    steps: StepsInBackward | None = None
    offload: Offload | None = None  # where plans may move values to; None: nowhere
    far_memory: FarMemory | None = None  # where they are then
    tally: Tally | None = None  # has counted bytes allocated before `fit`; None: none has

    @property
    def needs_plans(self) -> bool:
        """Whether an option has no effect on calls that run as plain PyTorch."""
        by_plan = (self.steps, self.offload, self.plan, self.ranks)
        return self.compile or self.arena or any(option is not None for option in by_plan)

    @property
    def searches_by_default(self) -> bool:
        """Whether the default planner searches plans for this process alone, not to be compiled."""
        is_default = self.planner == DEFAULT and self.plan is None
        return is_default and self.ranks is None and not self.compile

    def resolved(self, device: torch.device) -> Options:
        """Return the options with the free memory of a device in place of ``"device"``.

        Raises `BadInput` if they ask for a feature that the device does not have.
        """
        if self.offload is not None:
            refuse_on(device, self.offload)
            self.far_on(device)  # the link is measured before a limit begins
        if self.shared is not None or self.budget_bytes is not None:
            return self
        return dataclasses.replace(self, budget_bytes=_free_bytes(device, self.ranks))

    def far_on(self, device: torch.device) -> Far | None:
        if self.offload is None:
            return None
        taken_bytes = self.steps.far_bytes if self.steps is not None else 0
        threads = operator_threads(device.type)
        return self.offload.far(device, threads=threads, keeps=self.cache, taken_bytes=taken_bytes)

    @property
    def limit_bytes(self) -> int:
        """The bytes that may be held at any time, by all that share them."""
        if self.shared is not None:
            return self.shared.size_bytes
        assert self.budget_bytes is not None  # resolved before anything is planned
        return self.budget_bytes

    @property
    def usable_bytes(self) -> int:
        """The limit minus the reserve."""
        return usable_bytes(self.limit_bytes, self.reserve_bytes)

    @property
    def planned_bytes(self) -> int:
        """The bytes that plans may use: in an arena they leave some to memory outside of it."""
        return self.usable_bytes - self.left_bytes

    @property
    def enforced_bytes(self) -> int | None:
        """The limit above which requests are refused; None if they are not."""
        is_known = self.shared is not None or self.budget_bytes is not None
        return self.limit_bytes if is_known and self.on_exceed == "raise" else None

    @property
    def is_shared(self) -> bool:
        """Whether other callables share the budget, or will."""
        return self.others_to_come or (self.shared is not None and len(self.shared.members()) > 1)

    @property
    def is_alone(self) -> bool:
        """Whether the budget is for the plans of one callable, searched in this process."""
        return self.shared is None and self.ranks is None and self.plan is None

    def others_in_budget(self, account: Account) -> list[Account]:
        return self.shared.others(account) if self.shared is not None else []

    def known_tally(self, modules: Mapping[str, nn.Module]) -> Tally | None:
        """Return the tally that counts already for the device of some modules."""
        shared = self.shared.tally(device_of_modules(modules)) if self.shared is not None else None
        return shared or self.tally


def refuse_other_than_optimizer(optimizer: Any) -> None:
    """Raise `BadInput` if an object is given that is no optimizer."""
    if optimizer is None or hasattr(optimizer, "param_groups"):
        return
    several = isinstance(optimizer, list | tuple) and all(
        hasattr(each, "param_groups") for each in optimizer
    )
    way_out = "; with several, leave it out: each is found when it steps" if several else ""
    raise BadInput(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}{way_out}")


def make_options(
    budget: int | str | Budget,
    *,
    optimizer: Any = None,
    reserve: int | str = 0,
    exactness: str | None = None,
    planner: str = DEFAULT,
    limits: tuple[float, float] | Limits | None = None,
    plan: Plan | str | Path | None = None,
    costs: str = "measured",
    on_exceed: str = "raise",
    in_flight: int | None = None,
    cache: bool = True,
    compile: bool = False,
    arena: bool = False,
    update_in_backward: bool = False,
    clip_grad_norm: float | None = None,
    offload: int | str | Offload | None = None,
    progress: Progress = SILENT,
    stops_on_interrupt: bool = True,
) -> Options:
    """Check the keywords of `fit` and `step` and return them as options.

    Raises `BadInput` for a malformed budget, an unknown planner or keyword value.
    """
    chosen = _exactness(exactness, bool(compile))
    if on_exceed not in ("raise", "warn"):
        raise BadInput(f"on_exceed must be 'raise' or 'warn', got {on_exceed!r}")
    is_number = isinstance(in_flight, int) and not isinstance(in_flight, bool)
    if in_flight is not None and (not is_number or in_flight < 1):
        raise BadInput(f"in_flight must be an int of at least 1, got {in_flight!r}")
    refuse_other_than_optimizer(optimizer)
    find_planner(planner)
    refuse_unknown_costs(costs)
    steps, far = None, _far_memory(offload, planner, in_flight)
    alone = {
        "a Budget that several share": isinstance(budget, Budget),
        "compile=True": bool(compile),
        "arena=True": bool(arena),
    }
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise BadInput(f"clip_grad_norm must be a positive number, got {clip_grad_norm!r}")
    if update_in_backward or clip_grad_norm is not None:
        if optimizer is None:
            raise BadInput(
                "update_in_backward=True needs the optimizer whose steps it takes: optimizer="
            )
        _refuse_others("update_in_backward=True", alone)
        state_far = far if far is not None and far.optimizer_state else None
        in_flight, steps = 1, StepsInBackward(optimizer, clip_grad_norm, state_far)
    if far is not None:
        _refuse_others("offload=", alone)
        _move_state(far, steps)
        in_flight = 1
    return Options(
        budget_bytes=_size(budget),
        reserve_bytes=parse_bytes(reserve, what="reserve") if reserve else 0,
        planner=planner,
        limits=_limits(limits),
        plan=_plan(plan),
        costs=costs,
        on_exceed=on_exceed,  # type: ignore[arg-type]
        in_flight=in_flight,
        optimizer=optimizer,
        cache=bool(cache),
        progress=progress,
        shared=budget if isinstance(budget, Budget) else None,
        compile=bool(compile),
        stops_on_interrupt=stops_on_interrupt,
        arena=bool(arena),
        exactness=chosen,
        steps=steps,
        offload=far,
        far_memory=FarMemory(far) if far is not None else None,
    )


def incompatible(option: str, other: str) -> BadInput:
    return BadInput(f"{option} does not go with {other}: leave one of them out")


def _refuse_others(option: str, others: Mapping[str, bool]) -> None:
    """Raise `BadInput` if any other option is given."""
    for other, is_given in others.items():
        if is_given:
            raise incompatible(option, other)


def _far_memory(
    offload: int | str | Offload | None, planner: str, in_flight: int | None
) -> Offload | None:
    if offload is None:
        return None
    found = offload if isinstance(offload, Offload) else Offload(offload)
    if in_flight is not None and in_flight > 1:
        raise incompatible("offload=", "in_flight= of more than 1")
    if not find_planner(planner).moves:
        raise incompatible("offload=", f"planner={planner!r}, which moves nothing")
    return found


def refuse_on(device: torch.device, far: Offload) -> None:
    """Raise `BadInput` for far memory that a device does not have."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise incompatible("offload=", f"a model on the device {device} yet")
    if far.folder is not None:
        raise incompatible(
            "Offload(folder=...)", f"a model on {device}: far memory is the host's memory there"
        )
    if far.optimizer_state:
        raise incompatible("Offload(optimizer_state=True)", f"a model on {device} yet")


def _move_state(far: Offload, steps: StepsInBackward | None) -> None:
    """Move the optimizer's state to far memory where asked for."""
    if not far.optimizer_state:
        return
    if steps is None:
        raise BadInput(
            "Offload(optimizer_state=True) needs update_in_backward=True and optimizer=: only then "
            "each parameter's state is used at one moment of a step"
        )
    for group in steps.optimizer.param_groups:
        for parameter in group["params"]:
            refuse_on(parameter.device, far)
    refuse_without_file(far.place)
    if steps.far_bytes > far.size_bytes:
        raise BadInput(
            f"the state of {steps.name} takes {format_bytes(steps.far_bytes)} in far memory, "
            f"more than offload={format_bytes(far.size_bytes)}: name at least "
            f"{steps.far_bytes} bytes"
        )
    steps.move_state()


def _exactness(asked: str | None, compiled: bool) -> Exactness:
    if asked == "bitwise" and compiled:
        raise BadInput(
            "exactness 'bitwise' is not available with compile=True: fused kernels round "
            "differently from single operators ('rounding'). Leave one of the two out"
        )
    if asked is None:
        return "bitwise"
    for known in EXACTNESS:
        if asked == known:
            return known
    raise BadInput(
        f"exactness {asked!r} is unknown: 'bitwise' (the default) for the bits of plain PyTorch, "
        "'rounding' if the last digits may differ, 'lossy' if values may be kept less precisely"
    )


def _size(budget: int | str | Budget) -> int | None:
    if isinstance(budget, Budget):
        return budget.size_bytes
    return None if budget == "device" else parse_bytes(budget)


def _limits(limits: tuple[float, float] | Limits | None) -> Limits:
    if limits is None:
        return USUAL_LIMITS
    if isinstance(limits, Limits):
        return limits
    try:
        seconds, gap = map(float, limits)
    except (TypeError, ValueError):
        seconds = gap = -1.0
    if not (seconds >= 0 and gap >= 0):
        raise BadInput(f"limits must be (seconds, gap) such as (30, 0.001), got {limits!r}")
    return Limits(seconds=seconds, gap=gap)


def _plan(plan: Plan | str | Path | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    from tightfit.plan.io import load_plan

    return load_plan(Path(plan))


def _free_bytes(device: torch.device, ranks: Ranks | None) -> int:
    """Return free memory of a device for this process; of several ranks the least."""
    if device.type != "cuda":
        raise BadInput(
            "budget='device' needs a device with memory of its own (CUDA); on a CPU give bytes, "
            "such as budget='8GiB'"
        )
    free, _ = torch.cuda.mem_get_info(device)
    own = free + torch.cuda.memory_reserved(device)
    return own if ranks is None else min(ranks.gather("free", own))


def with_ranks(options: Options, ranks: Ranks) -> Options:
    """Return the options for several ranks: all keep to their least budget.

    Raises `BadInput` if the ranks were given different shared budgets or reserves.
    """
    sizes = ranks.gather("budget", options.budget_bytes or 0)
    reserves = ranks.gather("reserve", options.reserve_bytes)
    if len(set(reserves)) > 1 or (options.shared is not None and len(set(sizes)) > 1):
        raise BadInput(
            f"the ranks ask for different things: budgets of {_listed(sizes)}, reserves of "
            f"{_listed(reserves)}. Give every rank the same"
        )
    least = min(sizes)
    if options.budget_bytes != least and least:
        announce(f"the least budget of {ranks.size} ranks counts: {format_bytes(least)}")
    return dataclasses.replace(options, budget_bytes=least or None, ranks=ranks)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(format_bytes, sizes))


def largest_first(shapes: Iterable[Any], modules: Mapping[str, nn.Module]) -> list[Arguments]:
    """Return the calls that example inputs describe, the call with most elements first.

    `shapes`: for each call a tuple of positional inputs, a mapping of keyword inputs, or one
    tensor. A tensor on the ``"meta"`` device means zeros on the modules' device. `modules`:
    their first parameter decides the device. Raises `BadInput` if a shape is something else.
    """
    calls = [_call(example) for example in shapes]
    device = next((p.device for m in modules.values() for p in m.parameters()), None)
    given = [Arguments.of(*_real(call, device)) for call in calls]
    return sorted(given, key=lambda call: call.elements, reverse=True)


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    raise BadInput(
        "shapes= takes for each shape a tuple of positional inputs, a dict of keyword inputs or "
        f"one tensor, got a {type(example).__name__}"
    )


def _real(call: Any, device: torch.device | None) -> Any:
    """Return a call with zeros in place of meta tensors."""
    leaves, spec = flatten(call)
    return unflatten([_zeros(leaf, device) for leaf in leaves], spec)


def _zeros(leaf: Any, device: torch.device | None) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "meta":
        return leaf
    zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return zeros.requires_grad_(leaf.requires_grad)
