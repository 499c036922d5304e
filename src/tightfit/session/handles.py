"""Fitted callables as users hold them: modules fitted in place, and planned steps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tightfit.errors import BadInput
from tightfit.execution.attach import (
    attach,
    attached,
    attached_methods,
    original_forward,
    original_method,
    refuse_unfittable,
    was_fitted,
)
from tightfit.session.addresses import addresses_for
from tightfit.session.bypass import report_bypass
from tightfit.session.callee import Callee
from tightfit.session.copies import Copies
from tightfit.session.fitted import Fitted, prepare_all
from tightfit.session.memory.account import Account
from tightfit.session.options import Options, incompatible
from tightfit.session.parts.sharded import ShardedModel, group_of, late_bytes, sharded_parts
from tightfit.torch_private.tools import inside_compiled


def fit_in_place(
    model: nn.Module,
    options: Options,
    *,
    shapes: Iterable[Any] = (),
    methods: Sequence[str] = (),
) -> Fitted:
    """Fit a model in place: as a whole, or by its parts where they are sharded.

    `shapes`: example inputs to plan for now. `methods`: names of methods that are planned like the
    forward. Where this raises `BadInput`, nothing has changed.
    """
    parts = sharded_parts(model)
    if not parts:
        return _fit_whole(model, options, shapes, methods)
    if methods:
        raise BadInput("a model with sharded parts is planned part by part: it takes no methods=")
    if tuple(shapes):
        raise BadInput("a model with sharded parts is planned as it runs: it takes no shapes=")
    if options.steps is not None:
        raise BadInput(
            "update_in_backward=True does not go with a model whose parts are sharded "
            "(fully_shard): leave it out"
        )
    if options.offload is not None:
        raise incompatible("offload=", "a model whose parts are sharded (fully_shard) yet")
    if options.compile:
        raise BadInput(
            "compile=True is not available for a model with sharded parts: each part's bytes "
            "would follow its plan only roughly. Leave it out"
        )
    return _fit_in_parts(model, parts, options)


def _fit_whole(
    model: nn.Module, options: Options, shapes: Iterable[Any], names: Sequence[str]
) -> Fitted:
    """Plan the model as a whole; its copies are fitted within the same budget."""
    refuse_unfittable(model)
    methods = _methods_of(model, names, options)
    fitted = Fitted.as_a_whole(_callee_of(model), options)
    copies = Copies(fitted)

    def refit(copy: nn.Module) -> Fitted:
        refuse_unfittable(copy)
        own = dataclasses.replace(
            options, optimizer=None, steps=None, offload=None, far_memory=None
        )
        fitted = Fitted.as_a_whole(_callee_of(copy), own, copies)
        attach(copy, fitted, refit, _methods_of(copy, names, own, copies))
        return fitted

    for method in methods.values():
        fitted.at_leaving(method.leave)
    prepare_all(fitted, shapes)
    replaced = attached(model)
    attach(model, fitted, refit, methods)
    if replaced is None or not replaced.waiting:
        fitted.at_leaving(report_bypass(model, (fitted, *methods.values())))
    if replaced is not None:
        replaced.leave()
    return fitted


def _fit_in_parts(model: nn.Module, parts: dict[str, nn.Module], options: Options) -> Fitted:
    replaced = attached(model)
    if replaced is not None:
        replaced.leave()
    refuse_unfittable(model)
    group, late = group_of(model), late_bytes(parts)
    return attach_by_parts(model, parts, options, group=group, late_bytes=late)


def _callee_of(module: nn.Module) -> Callee:
    """Return the forward of a module that is to be fitted in place."""
    name = type(module).__name__
    return Callee(original_forward(module), {"model": module}, name, weakref.ref(module))


def _methods_of(
    module: nn.Module, names: Iterable[str], options: Options, copies: Copies | None = None
) -> dict[str, Fitted]:
    """Return fitted methods of a module, each planned as a step of its own."""
    kind = type(module).__name__
    callees = {
        name: Callee(original_method(module, name), {"model": module}, f"{kind}.{name}")
        for name in names
    }
    return {name: Fitted.as_a_whole(callee, options, copies) for name, callee in callees.items()}


def attach_by_parts(
    model: nn.Module,
    parts: Mapping[str, nn.Module],
    options: Options,
    *,
    group: Any = None,
    late_bytes: int = 0,
) -> Fitted:
    """Fit a model in place, each of the given parts by itself; see `ShardedModel`."""

    def refit(copy: nn.Module) -> NoReturn:
        raise BadInput("a model with sharded parameters cannot be copied")

    callee = _callee_of(model)
    tally = options.known_tally(callee.modules)
    account = Account(callee.modules, options.optimizer, tally)
    route = ShardedModel(callee, parts, options, account, group=group, late_bytes=late_bytes)
    fitted = Fitted(callee, options, account, route, addresses_for(callee.name, account, options))
    attach(model, fitted, refit)
    route.attach_parts()
    fitted.at_leaving(route.leave)
    return fitted


class PlannedStep:
    """A callable that runs its function as a planned step; made by `step`."""

    _torchdynamo_disable = True

    def __init__(self, fitted: Fitted) -> None:
        self._fitted = fitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one planned forward; call ``backward()`` on its result."""
        return self._fitted(args, kwargs)


def fitted_of(target: nn.Module | PlannedStep) -> Fitted:
    """Return the `Fitted` of a model or step, under any wrapper.

    Raises `BadInput` if it is neither.
    """
    if isinstance(target, PlannedStep):
        return target._fitted
    module = target.module if isinstance(target, DistributedDataParallel) else target
    fitted = attached(inside_compiled(module)) if isinstance(module, nn.Module) else None
    if not isinstance(fitted, Fitted):
        saved = isinstance(module, nn.Module) and was_fitted(module)
        raise BadInput(
            "this is neither a fitted model nor a step: call tightfit.fit first"
            + " (it was fitted when it was saved, and is loaded as the plain model)" * saved
        )
    return fitted


def used_of(target: nn.Module | PlannedStep) -> Fitted:
    """Return the `Fitted` of a step or model; with planned methods, the used one of largest peak.

    Raises `BadInput` if it is neither.
    """
    fitted = fitted_of(target)
    root = fitted.callee.root
    methods = () if root is None else attached_methods(root).values()
    if not methods:
        return fitted
    used = [
        candidate
        for candidate in (fitted, *methods)
        if isinstance(candidate, Fitted) and candidate.is_used
    ]
    return max(used, key=lambda candidate: candidate.report().planned_peak_bytes, default=fitted)
