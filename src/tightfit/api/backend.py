"""``torch.compile(model, backend="tightfit", options={"budget": "8GiB"})``.

Dynamo finds this backend by its entry point (group ``torch_dynamo_backends``) and hands over one
graph for each stretch of Python that it can see through. Each graph becomes a planned step of its
own; all graphs compiled with the same options share one budget. Nothing is decided before a graph
is first called, so that errors reach the user as they are, not as failures of a compiler.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from tightfit.errors import BadInput
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


_OPTIONS: dict[int, tuple[Any, Options]] = {}
"""By the identity of what was asked for, which is kept so that it stays its own."""


def _options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Return the options of all graphs that were compiled with the same: they share a budget."""
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
    if id(options) not in _OPTIONS:
        made = make_options(**options)
        shared = made.shared or Budget(made.budget_bytes or 0)
        made = dataclasses.replace(made, shared=shared, others_to_come=True)
        _OPTIONS[id(options)] = (options, made)
    return _OPTIONS[id(options)][1]


class _Graph:
    """One graph of Dynamo's, planned when it is first called."""

    def __init__(
        self, module: fx.GraphModule, mode: str | None, options: Mapping[str, Any] | None
    ) -> None:
        self.module = fx.GraphModule(module, module.graph)  # its code made now, not in the trace
        self.asked = (mode, options)
        self.fitted: Fitted | None = None
        self.parameters = nn.Module()
        self.places: dict[int, str] = {}  # which inputs are parameters

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph; as it is where nothing needs a gradient."""
        if self.fitted is None:
            names = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
            self.places = {i: names[i] for i, x in enumerate(inputs) if isinstance(x, nn.Parameter)}
        for index, name in self.places.items():
            self.parameters._parameters[name] = inputs[index]
        fitted = self.fitted = self.fitted or self._start(len(inputs))
        return fitted(tuple(x for i, x in enumerate(inputs) if i not in self.places), {})

    def _start(self, count: int) -> Fitted:
        modules = {"held": self.parameters, "traced": self.module}
        callee = Callee(self._run, modules, f"graph of {count} inputs")
        return Fitted.as_a_whole(callee, _options(*self.asked))

    def _run(self, *rest: Any) -> Any:
        given = iter(rest)
        count = len(rest) + len(self.places)
        return self.module(
            *(
                getattr(self.parameters, self.places[i]) if i in self.places else next(given)
                for i in range(count)
            )
        )
