"""fit, step, prepare, report, unfit: train inside a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tightfit.api.report import Report, reported
from tightfit.capture.calls.structure import Arguments
from tightfit.errors import BadInput
from tightfit.execution.attach import attached, detach
from tightfit.execution.far.offload import Offload
from tightfit.plan.plan import Plan
from tightfit.planners.base import Limits
from tightfit.planners.registry import DEFAULT
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.fitted import Fitted, prepare_all
from tightfit.session.handles import PlannedStep, fit_in_place, fitted_of, used_of
from tightfit.session.memory.budget import Budget
from tightfit.session.options import Options, incompatible, make_options
from tightfit.torch_private.tools import inside_compiled


def fit(
    model: nn.Module,
    budget: int | str | Budget,
    *,
    optimizer: Any = None,
    methods: str | Iterable[str] = (),
    reserve: int | str = 0,
    exactness: str | None = None,
    planner: str = DEFAULT,
    limits: tuple[float, float] | Limits | None = None,
    plan: Plan | str | Path | None = None,
    costs: str = "measured",
    on_exceed: str = "raise",
    in_flight: int | None = None,
    cache: bool = True,
    shapes: Iterable[Any] = (),
    compile: bool = False,
    arena: bool = False,
    update_in_backward: bool = False,
    clip_grad_norm: float | None = None,
    offload: int | str | Offload | None = None,
) -> nn.Module:
    """Make a model train inside a memory budget, in place.

    Every later call of the model in training runs a plan whose peak, constants included, is
    verified not to exceed the budget. Results are those of plain PyTorch, bit for bit.

    Parameters
    ----------
    model : nn.Module
        The model; it may return its loss or its prediction.
    budget : int, str or Budget
        Bytes, or text such as ``"8GiB"``, or ``"device"`` (free memory of a GPU now), or a `Budget`
        that several models share. A deep copy of the model that trains shares it, too.
    optimizer : torch.optim.Optimizer, optional
        Tells the size of its state; without it two copies of the parameters are assumed until
        the first step has shown the truth.
    methods : str or iterable of str
        Methods that the training calls in addition to the forward, or instead of it, such as
        ``"get_action_and_value"``. Each is planned like the forward, in the same budget. Where one
        calls another, they are planned as one.
    reserve : int or str
        Part of the budget that plans leave unused.
    exactness : str, optional
        How exact the operators are that plans may choose: ``"bitwise"`` (the default, plain
        PyTorch's bits), ``"rounding"`` (the last digits may differ; with `compile` they always
        do) or ``"lossy"`` (values kept less precisely).
    planner, limits : str, (seconds, gap)
        Which planner, and when it may stop.
    plan : Plan or path, optional
        A plan to use instead of planning; verified first.
    costs : str
        ``"measured"``, or modelled: ``"unit"``, ``"flops"``, ``"cpu"``, ``"p100"``, ``"v100"``,
        ``"a100"`` or ``"h100"``.
    on_exceed : str
        ``"raise"``: the CPU's allocator refuses requests above the budget by any code, until
        `unfit`. Where it cannot (on a GPU), a step that was measured above the budget raises.
        ``"warn"``: such a step is only warned of.
    in_flight : int, optional
        How many forwards may await their backward at once, each with its part of the budget;
        more are refused. Without it the loop shows how many there are.
    cache : bool
        Whether plans and costs from steps are kept on disk (in the folder that
        ``TIGHTFIT_CACHE_DIR`` names, or the platform's) and found again by the next process.
    shapes : iterable
        Example inputs of the shapes to come, planned now, the largest first: a tuple of positional
        inputs, a mapping of keyword inputs, or one tensor each. Tensors may be on the ``"meta"``
        device. Other shapes may still come: each starts at once with the best known plan, and a
        better plan is searched in the background.
    compile : bool
        Whether Inductor may compile the planned programs. At most three plans are compiled and
        tried, and the fastest that was measured to hold the budget runs. Where none holds it, or
        operators one by one are faster, the plan runs that way, which is said. Results of compiled
        plans differ from eager by rounding.
    arena : bool
        Whether the memory of a step is at planned addresses (Sekiyama et al. 2018). On the CPU the
        budget then bounds the memory of the process: plans leave as much of it as was measured
        outside of tensors, and the report names that. On a GPU (untested on one) it bounds bytes
        reserved by PyTorch's allocator. Requests that differ from the plan are served as without
        the arena, and counted.
    update_in_backward : bool
        Whether the step of `optimizer` is part of the plan. Each parameter is stepped by the
        optimizer's own code as soon as its gradient is final and nothing needs the old weight, and
        the gradient is freed. ``optimizer.step()`` and ``zero_grad()`` then do nothing for these
        parameters; the loop still calls them, once for each backward.
    clip_grad_norm : float, optional
        Clips the norm of all gradients to this before any step, in the plan, as
        ``clip_grad_norm_(model.parameters(), clip_grad_norm)`` would. The optimizer then steps in
        backward, too, once all gradients are there.
    offload : int, str or Offload, optional
        Bytes that a step may hold in far memory: a file on the CPU, pinned memory of the host on a
        GPU. Plans then keep values, compute them again, or move them there and back while operators
        run, whichever is cheapest. ``"16GiB"``, or an `Offload` that names the file's folder, too.

    Returns
    -------
    nn.Module
        The same model.

    Raises
    ------
    BadInput
        For a malformed budget or a model that is wrapped, compiled or fitted in part. Nothing has
        changed then.
    InfeasibleBudget
        If one of `shapes` does not fit. Nothing has changed then either.
    """
    names = (methods,) if isinstance(methods, str) else tuple(dict.fromkeys(methods))
    if names and (update_in_backward or clip_grad_norm is not None):
        raise incompatible("update_in_backward=True", "methods=")
    if names and offload is not None:
        raise incompatible("offload=", "methods=")
    options = make_options(
        _shared_budget(budget) if names else budget,
        optimizer=optimizer,
        reserve=reserve,
        exactness=exactness,
        planner=planner,
        limits=limits,
        plan=plan,
        costs=costs,
        on_exceed=on_exceed,
        in_flight=in_flight,
        cache=cache,
        compile=compile,
        arena=arena,
        update_in_backward=update_in_backward,
        clip_grad_norm=clip_grad_norm,
        offload=offload,
    )
    return fit_by_options(model, options, shapes=shapes, methods=names)


def fit_by_options(
    model: nn.Module, options: Options, *, shapes: Iterable[Any] = (), methods: Sequence[str] = ()
) -> nn.Module:
    """Fit a model as `fit` does; its options are one value."""
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"fit takes an nn.Module, got {type(model).__name__}; for a function use "
            "tightfit.step(function, modules=...)"
        )
    inner = inside_compiled(model)
    if not methods:
        _refuse_without_forward(type(inner))
    if options.optimizer is not None:
        _announce_foreign_optimizer(options.optimizer, inner)
    if inner is not model:
        announce(
            f"{type(inner).__name__} inside torch.compile is fitted: it runs its plan, and nothing "
            "of it is compiled (compile=True of fit compiles the plan)"
        )
    fit_in_place(inner, options, shapes=shapes, methods=methods)
    return model


def _refuse_without_forward(kind: type[nn.Module]) -> None:
    """Raise if calling a module of a class runs no forward, in whose place a plan would run."""
    if kind.__call__ is not nn.Module.__call__ and kind.forward is nn.Module.forward:
        raise BadInput(
            f"{kind.__name__} has a __call__ of its own and no forward: a plan runs in place of a "
            "forward. Way out: name that __call__ forward, which nn.Module calls"
        )


def _announce_foreign_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Say so if an optimizer trains nothing of a model that has parameters to train."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    if trained and held and not trained & held:
        announce(
            f"{type(model).__name__}: the optimizer that fit was given holds none of its "
            f"{len(trained)} trained parameters, but {len(held)} others: its state is counted. "
            "Pass the optimizer that trains the model, or none: it is found when it exists"
        )


def _shared_budget(budget: int | str | Budget) -> Budget:
    """Return the budget that a model's forward and its methods have in common."""
    if budget == "device":
        raise BadInput("methods= needs a budget in bytes, such as '8GiB', not 'device'")
    return budget if isinstance(budget, Budget) else Budget(budget)


def step(
    function: Callable[..., Any],
    *,
    modules: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
    budget: int | str | Budget,
    shapes: Iterable[Any] = (),
    **keywords: Any,
) -> PlannedStep:
    """Make a function of the inputs run as one planned step, the loss inside the plan.

    Parameters
    ----------
    function : callable
        Any callable that computes a loss (or predictions) with the modules.
    modules : nn.Module, iterable or mapping of them
        Every module whose parameters the function uses.
    budget : int or str
        As in `fit`; so are all further keywords.
    shapes : iterable
        As in `fit`.

    Returns
    -------
    PlannedStep
        Call it like the function, then call ``backward()`` on the loss.
    """
    if not callable(function):
        raise BadInput(f"step takes a callable, got {type(function).__name__}")
    options = make_options(budget, **keywords)
    named = _named(modules)
    for name, module in named.items():
        if isinstance(module, DistributedDataParallel):
            raise BadInput(
                f"module {name!r} is wrapped (DistributedDataParallel), whose forward talks to "
                "other processes: a step cannot hold that. Make a module whose forward returns "
                "the loss, tightfit.fit it, then wrap it"
            )
        if attached(module) is not None:
            raise BadInput(
                f"module {name!r} is fitted already: tightfit.unfit it first; the step then plans "
                "all of it"
            )
    name = getattr(function, "__name__", type(function).__name__)
    fitted = Fitted.as_a_whole(Callee(function, named, name), options)
    prepare_all(fitted, shapes)
    return PlannedStep(fitted)


def _named(modules: Any) -> dict[str, nn.Module]:
    if isinstance(modules, nn.Module):
        return {"model": modules}
    if isinstance(modules, Mapping):
        named = dict(modules)
    else:
        named = {f"module{i}": m for i, m in enumerate(modules)}
    wrong = [k for k, m in named.items() if not isinstance(m, nn.Module)]
    if wrong or not named:
        raise BadInput("modules= must be one nn.Module or several of them")
    return named


def prepare(target: nn.Module | PlannedStep, *args: Any, **kwargs: Any) -> Report:
    """Plan for the given inputs now: nothing is trained, buffers and generators stay as they are.

    Parameters
    ----------
    target : nn.Module or PlannedStep
        A fitted model, also inside DistributedDataParallel (all ranks must call this then), or a
        step.
    *args, **kwargs
        Inputs as in a call of it.

    Returns
    -------
    Report
        Peak, overhead and bound of the plan.
    """
    fitted = fitted_of(target)
    if isinstance(target, DistributedDataParallel):
        fitted.join_replicas(target)
    fitted.prepare(Arguments.of(args, kwargs))
    return reported(fitted)


def report(target: nn.Module | PlannedStep, *, next_exactness: bool = False) -> Report:
    """Return the report on a fitted model or step.

    Parameters
    ----------
    target : nn.Module or PlannedStep
        A fitted model, or a step.
    next_exactness : bool
        Whether to plan once more with the next, less exact class of alternatives, and to report its
        gain. It takes as long as a search may, between two steps; the plan stays.

    Raises
    ------
    BadInput
        If it is not fitted, nothing has been planned yet, or the further answers asked for cannot
        be given.
    """
    fitted = used_of(target)
    fitted.settle()
    return reported(fitted, next_exactness=next_exactness)


def unfit(model: nn.Module) -> nn.Module:
    """Give a fitted model its own forward back; return it.

    Raises
    ------
    BadInput
        If the model is not fitted.
    """
    inner = inside_compiled(model)
    fitted = attached(inner)
    if fitted is None:
        raise BadInput("the model is not fitted")
    fitted.leave()
    detach(inner)
    return model
