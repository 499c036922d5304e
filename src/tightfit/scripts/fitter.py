"""Fits a program: the modules that it fits itself, or else those that it trains."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.allocator.alive import alive
from tightfit.api.fit import fit, fit_by_options, step, unfit
from tightfit.errors import BadInput
from tightfit.scripts.job import CannotProve, Job
from tightfit.scripts.program_memory import ProgramMemory
from tightfit.scripts.trained import TrainedModules, unwrapped
from tightfit.session.handles import fitted_of
from tightfit.session.memory.budget import Budget
from tightfit.session.memory.devices import device_of_modules
from tightfit.session.memory.optimizers import subclasses_of
from tightfit.session.options import make_options, refuse_other_than_optimizer
from tightfit.units import parse_bytes


class Fitter:
    """Fits the modules that a program trains; in its plain run it only registers them.

    A program that calls `tightfit.fit` or `tightfit.step` chooses its modules itself. Of another
    program, each module that no other module calls is fitted when it first trains: the outermost
    module that owns parameters of an optimizer. Several of them share the budget. Memory counts
    from when the last optimizer was made before the first of them.

    `names`: the classes of fitted modules and steps.
    """

    def __init__(self, job: Job, trained: TrainedModules, memory: ProgramMemory) -> None:
        self.names: tuple[str, ...] = ()
        self._job = job
        self._is_plain = job.mode == "plain"
        self._trained = trained
        self._memory = memory
        self._program_fits = False
        self._fitted_here: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._covered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._shared: Budget | None = None
        self._replaced: list[Any] = []

    # -- replacements for tightfit's functions, called by the program ---------------------------

    def fit(self, model: nn.Module, budget: int | str | Budget, **keywords: Any) -> nn.Module:
        self._leave_to_program()
        budget = self._budget_of(model, budget)
        self._register([model], keywords.get("optimizer"), budget)
        self._register_steps_in_backward(keywords)
        self.names += (type(model).__name__,)
        return model if self._is_plain else fit(model, budget, **keywords)

    def step(
        self,
        function: Callable[..., Any],
        *,
        modules: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
        budget: int | str | Budget,
        **keywords: Any,
    ) -> Callable[..., Any]:
        self._leave_to_program()
        if not isinstance(modules, nn.Module | Mapping):
            modules = list(modules)
        budget = self._budget_of(function, budget)
        self._register(_as_list(modules), keywords.get("optimizer"), budget)
        self._register_steps_in_backward(keywords)
        self.names += (getattr(function, "__name__", type(function).__name__),)
        if self._is_plain:
            return function
        return step(function, modules=modules, budget=budget, **keywords)

    def _register_steps_in_backward(self, keywords: Mapping[str, Any]) -> None:
        """Leave gradients that a step in backward frees out of the comparison.

        Raises `CannotProve` if gradients are clipped there: nothing clips them in the plain run.
        """
        if keywords.get("clip_grad_norm") is not None:
            raise CannotProve(
                "the program has a plan clip its gradients (clip_grad_norm=), which nothing does "
                "in the plain run. Way out: leave it out, or clip_grad_norm_ without "
                "update_in_backward"
            )
        if keywords.get("update_in_backward") and keywords.get("optimizer") is not None:
            self._trained.step_in_backward(keywords["optimizer"])

    def unfit(self, model: nn.Module) -> nn.Module:
        self._memory.end(model)
        return model if self._is_plain else unfit(model)

    def enter_region(self, budget: int | str) -> None:
        """Count everything in the process: `tightfit.online` has the budget."""
        self._leave_to_program()
        self._memory.begin_with_all(parse_bytes(budget))
        self.names += ("online",)

    def compile_graph(self, budget: int | str | Budget) -> None:
        """Register all modules called so far: a graph is compiled with tightfit as backend."""
        self._leave_to_program()
        self._register(self._trained.modules(), None, budget)
        self.names += ("a graph of torch.compile",)

    def _leave_to_program(self) -> None:
        if not self.names:
            self._memory.count_from_fit()
        self._program_fits = True
        for module in self._fitted_here:
            self.unfit(module)
        self._fitted_here.clear()

    def _budget_of(self, fitted: Any, budget: int | str | Budget) -> int | str | Budget:
        """Return the budget of the job, or else the program's own."""
        if self._job.budget_bytes is None:
            return budget
        if isinstance(budget, Budget):
            self._shared = self._shared or Budget(self._job.budget_bytes)
            return self._shared
        if any(other is not fitted for other in self._replaced):
            raise CannotProve(
                "the program gives several models or steps budgets of their own: leave --budget "
                "out, and theirs count"
            )
        self._replaced.append(fitted)
        return self._job.budget_bytes

    # -- modules of programs that fit nothing themselves ----------------------------------------

    def on_new_optimizer(self, optimizer: Any) -> None:
        """Count from now on, as if the program fitted its modules once it has an optimizer."""
        if self._program_fits:
            return
        if self._fitted_here:
            gc.collect()  # a fitted module that is gone is garbage, a plain one is freed
        devices = [p.device for group in optimizer.param_groups for p in group["params"]]
        device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
        self._memory.count_from_now(device)

    def before_call(self, module: nn.Module) -> None:
        """Fit a module that the program is about to call, if it trains and is not fitted.

        Raises `CannotProve` if it must be fitted and no budget was given.
        """
        if self._program_fits or not torch.is_grad_enabled() or hasattr(module, "_orig_mod"):
            return
        module = unwrapped(module)
        if module in self._covered:
            return
        own = {id(p) for p in module.parameters() if p.requires_grad}
        if not own:
            return
        optimizers = _optimizers()
        stepping = [o for o in optimizers if own & _trained_by(o)]
        if stepping:
            is_all = all(own >= _trained_by(o) for o in optimizers)
            self._fit_here(module, stepping, is_all=is_all)

    def refusal(self) -> CannotProve | None:
        """Return the error of a program that has trained, if nothing was fitted."""
        if self.names:
            return None
        return CannotProve(
            "the program trains, but calls no module that could be fitted: it uses parameters "
            "outside of modules, calls methods of modules other than their forward, or calls "
            "modules that torch.compile has wrapped. Way out: tightfit.fit (with methods=, "
            "which names such methods) or tightfit.step in the program"
        )

    def _fit_here(self, module: nn.Module, optimizers: list[Any], *, is_all: bool) -> None:
        """Fit a module; `is_all`: whether it has all parameters of all optimizers.

        Raises `CannotProve` if it is one that cannot be fitted.
        """
        if self._job.budget_bytes is None:
            raise CannotProve(
                f"the program fits nothing itself: give a budget for its {type(module).__name__}, "
                "such as --budget 8GiB"
            )
        for inner in self._fitted_here.intersection(module.modules()):
            self._fitted_here.remove(inner)
            self.unfit(inner)
        budget: int | Budget = self._job.budget_bytes
        if self._fitted_here or not is_all:
            budget = self._shared_budget(self._job.budget_bytes)
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        self._register([module], optimizer, budget)
        self.names += (type(module).__name__,)
        self._fitted_here.add(module)
        self._covered.update(module.modules())
        if not self._is_plain:
            options = make_options(budget, optimizer=optimizer, **self._job.keywords)
            tally = self._memory.tally_on(device_of_modules({"": module}))
            try:
                fit_by_options(module, dataclasses.replace(options, tally=tally))
            except BadInput as refused:
                raise CannotProve(f"{type(module).__name__} cannot be fitted: {refused}") from None

    def _shared_budget(self, budget_bytes: int) -> Budget:
        if self._shared is None:
            self._shared = Budget(budget_bytes)
            for module in self._fitted_here:
                self._register([module], None, self._shared)
                if not self._is_plain:
                    fitted_of(module).share(self._shared)
        return self._shared

    def _register(
        self, modules: list[nn.Module], optimizer: Any, budget: int | str | Budget
    ) -> None:
        refuse_other_than_optimizer(optimizer)
        for module in modules:
            self._trained.add(module)
        self._memory.begin(modules, optimizer, budget)


def _as_list(modules: Any) -> list[nn.Module]:
    if isinstance(modules, nn.Module):
        return [modules]
    return list(modules.values() if isinstance(modules, Mapping) else modules)


def _optimizers() -> list[Any]:
    return alive(subclasses_of(torch.optim.Optimizer))


def _trained_by(optimizer: Any) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""

    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
