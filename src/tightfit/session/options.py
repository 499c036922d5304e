"""What a user may ask for, checked once at the border."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tightfit.errors import BadInput
from tightfit.plan.plan import Plan
from tightfit.planners.base import Limits
from tightfit.planners.registry import DEFAULT, find_planner
from tightfit.progress import SILENT, Progress
from tightfit.session.memory.budget import Budget
from tightfit.session.processes import Ranks
from tightfit.units import parse_bytes

__all__ = ["Options", "make_options"]

_LIMITS = Limits(seconds=10.0)


@dataclass(frozen=True)
class Options:
    """The checked keywords of `fit` and `step`.

    Parameters
    ----------
    budget_bytes : int or None
        The limit; None: what the device has free, minus the reserve.
    reserve_bytes : int
        Bytes of the budget left unused.
    planner : str
        Name in the registry.
    limits : Limits
        When the planner stops.
    plan : Plan or None
        A plan to use instead of planning, if it fits the captured graph.
    costs : str
        ``"measured"``, ``"unit"``, ``"flops"`` or ``"roofline:DEVICE"``.
    on_exceed : str
        What the guard does when a step exceeds the budget.
    in_flight : int
        How many planned forwards may await their backward at once.
    optimizer : torch.optim.Optimizer or None
        Tells the size of its state.
    cache : bool
        Whether plans and costs from steps are kept on disk for the next process.
    shared : Budget or None
        The budget that several fitted callables share, if this one does.
    ranks : Ranks or None
        The processes that train the same model, once they are known.
    compile : bool
        Whether planned programs are compiled by Inductor.
    """

    budget_bytes: int | None
    reserve_bytes: int = 0
    planner: str = DEFAULT
    limits: Limits = _LIMITS
    plan: Plan | None = None
    costs: str = "measured"
    on_exceed: Literal["raise", "warn"] = "raise"
    in_flight: int = 1
    optimizer: Any = None
    cache: bool = True
    progress: Progress = field(default=SILENT)
    shared: Budget | None = None
    ranks: Ranks | None = None
    compile: bool = False


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
    in_flight: int = 1,
    cache: bool = True,
    compile: bool = False,
    progress: Progress = SILENT,
) -> Options:
    """Check the keywords of `fit` and `step` and return them as options.

    Raises
    ------
    BadInput
        For a malformed budget, an unknown planner or keyword value.
    """
    _check_exactness(exactness, bool(compile))
    if on_exceed not in ("raise", "warn"):
        raise BadInput(f"on_exceed must be 'raise' or 'warn', got {on_exceed!r}")
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise BadInput(f"in_flight must be an int of at least 1, got {in_flight!r}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise BadInput(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    find_planner(planner)
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
    )


def _check_exactness(exactness: str | None, compiled: bool) -> None:
    """Refuse an exactness that the way of running does not have."""
    available = "rounding" if compiled else "bitwise"
    if exactness in (None, available):
        return
    if compiled:
        raise BadInput(
            f"exactness {exactness!r} is not available with compile=True: fused kernels round "
            "otherwise than single operators do ('rounding'). Leave one of the two out"
        )
    raise BadInput(
        f"exactness {exactness!r} is not available: every operator here computes the same bits "
        "as eager ('bitwise'); only compile=True rounds otherwise"
    )


def _size(budget: int | str | Budget) -> int | None:
    if isinstance(budget, Budget):
        return budget.size_bytes
    return None if budget == "device" else parse_bytes(budget)


def _limits(limits: tuple[float, float] | Limits | None) -> Limits:
    if limits is None:
        return _LIMITS
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
