"""``torch.compile(model, backend="tightfit", options={"budget": "8GiB"})``.

Dynamo finds this backend by its entry point (group ``torch_dynamo_backends``) and hands over one
graph for each stretch of Python that it can see through. Each graph becomes a planned step of its
own; all graphs compiled with the same options share one budget. Nothing is decided before a graph
is first called, so that errors reach the user as they are, not as failures of a compiler.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from tightfit.capture.calls.structure import Arguments
from tightfit.errors import BadInput, NothingToTrain
from tightfit.session.callee import Callee
from tightfit.session.fitted import Fitted
from tightfit.session.memory.budget import Budget
from tightfit.session.options import Options, make_options

__all__ = ["backend"]

_HOW = 'torch.compile(model, backend="tightfit", options={"budget": "8GiB"})'
_KEYS = tuple(key for key in inspect.signature(make_options).parameters if key != "progress")


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return what runs one graph of Dynamo's within a budget.

    Parameters
    ----------
    module : fx.GraphModule
        The graph; parameters and buffers are among its inputs.
    example_inputs : sequence
        Not needed: a graph is planned for the inputs it is called with.
    mode : str, optional
        Belongs to Inductor and is refused.
    options : mapping
        ``"budget"`` and, if wanted, further keywords of `tightfit.fit`.

    Returns
    -------
    callable
        Takes the graph's inputs. Its first call raises `BadInput` for options that cannot be used.
    """
    return _Graph(module, mode, options)


class _Family:
    """The graphs that were compiled with the same options and share a budget.

    In the first step nobody knows how many there will be: each runs its least-memory plan. Once
    one of them is called again all are known, and each plans with its share.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.budget = options.shared or Budget(options.budget_bytes or 0)
        self.graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()  # those that train
        self.others: weakref.WeakSet[_Graph] = weakref.WeakSet()  # they take no share
        self.is_complete = False

    def share(self) -> None:
        """Divide the budget among the graphs known by now."""
        self.is_complete = True
        for graph in (*self.graphs, *self.others):
            graph.change_options(self.options_of_one())
        if len(self.graphs) > 1:  # backward runs through all of them, the last one first
            accounts = [g.fitted.account for g in self.graphs if g.fitted is not None]
            self.budget.expect_inside(accounts)

    def options_of_one(self) -> Options:
        """Return the options of each graph."""
        if len(self.graphs) > 1:
            return dataclasses.replace(self.options, shared=self.budget)
        return self.options


_FAMILIES: dict[int, tuple[Any, _Family]] = {}
"""By the identity of the options, which are kept so that it stays theirs."""


def _family(mode: str | None, options: Mapping[str, Any] | None) -> _Family:
    if mode is not None:
        raise BadInput(f"mode={mode!r} belongs to Inductor. Use {_HOW}")
    if not options or "budget" not in options:
        raise BadInput(f"the backend 'tightfit' needs a budget. Use {_HOW}")
    unknown = sorted(set(options) - set(_KEYS))
    if unknown:
        raise BadInput(
            f"unknown option {unknown[0]!r} of the backend 'tightfit' (known: {', '.join(_KEYS)})"
        )
    if options["budget"] == "device":
        raise BadInput(
            "the backend 'tightfit' needs a budget in bytes, not 'device': several graphs may "
            f"share it. Use {_HOW}"
        )
    if id(options) not in _FAMILIES:
        _FAMILIES[id(options)] = (options, _Family(make_options(**options)))
    return _FAMILIES[id(options)][1]


class _Graph:
    """One graph of Dynamo's, planned when it is first called."""

    def __init__(
        self, module: fx.GraphModule, mode: str | None, options: Mapping[str, Any] | None
    ) -> None:
        self.module = fx.GraphModule(module, module.graph)  # its code made now, not in the trace
        self.asked = (mode, options)
        self.family: _Family | None = None
        self.fitted: Fitted | None = None
        self.parameters = nn.Module()
        self.places: dict[int, str] = {}  # which inputs are parameters

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph; as it is where nothing needs a gradient."""
        fitted = self.fitted = self.fitted or self._start(inputs)
        for index, name in self.places.items():
            self.parameters._parameters[name] = inputs[index]
        rest = tuple(x for i, x in enumerate(inputs) if i not in self.places)
        family = self.family
        assert family is not None
        if self not in family.others and fitted.callee.trains(Arguments.of(rest, {})):
            try:
                self._settle(family, fitted, rest)
            except NothingToTrain:  # which it runs plainly
                family.graphs.discard(self)
                family.others.add(self)
        return fitted(rest, {})

    def _start(self, inputs: Sequence[Any]) -> Fitted:
        self.family = _family(*self.asked)
        names = [n.name for n in self.module.graph.nodes if n.op == "placeholder"]
        self.places = {i: names[i] for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)}
        modules = {"held": self.parameters, "traced": self.module}
        callee = Callee(self._run, modules, f"graph of {len(names)} inputs")
        return Fitted.as_a_whole(callee, self.family.options_of_one())

    def _run(self, *rest: Any) -> Any:
        given = iter(rest)
        count = len(rest) + len(self.places)
        return self.module(
            *(
                getattr(self.parameters, self.places[i]) if i in self.places else next(given)
                for i in range(count)
            )
        )

    def change_options(self, options: Options) -> None:
        """Plan the next step with other options."""
        assert self.fitted is not None
        self.fitted.change_options(options)

    def _settle(self, family: _Family, fitted: Fitted, rest: tuple[Any, ...]) -> None:
        """Run the least-memory plan in the first step, within the share from then on."""
        if self not in family.graphs:
            family.graphs.add(self)
            if family.is_complete:  # one more than was known
                family.share()
        elif not family.is_complete:
            family.share()
        if not family.is_complete:
            # a plan that runs once is not worth compiling
            options = dataclasses.replace(family.options, compile=False)
            fitted.change_options(options)
            least = fitted.declare_needs(Arguments.of(rest, {}), family.budget)
            if least.found_bytes <= family.budget.size_bytes:
                fitted.change_options(dataclasses.replace(options, plan=least.plan))
