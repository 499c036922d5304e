"""``torch.compile(model, backend="tightfit", options={"budget": "8GiB"})``.

Dynamo finds this backend by its entry point (group ``torch_dynamo_backends``) and hands over one
graph for each stretch of Python that it can see through. All graphs compiled with the same options
are steps of one callable, within one budget. Nothing is decided before a graph is first called, so
that errors reach the user as they are, not as failures of a compiler.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from tightfit.capture.handed import HandedGraph
from tightfit.dynamo.backend import GraphCall, backend_of
from tightfit.errors import BadInput
from tightfit.session.callee import Callee
from tightfit.session.fitted import Fitted
from tightfit.session.options import make_options

_HOW = 'torch.compile(model, backend="tightfit", options={"budget": "8GiB"})'
_KEYS = tuple(key for key in inspect.signature(make_options).parameters if key != "progress")


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a callable that runs one graph of Dynamo's within a budget.

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
    made = backend_of(lambda graph: _family(mode, options).hand_over(graph))
    return made(module, example_inputs)


class _Family:
    """The graphs that were compiled with the same options: steps of one callable.

    `options`: as the user gave them; they are kept, so that their identity stays theirs.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.given = options
        self._options = make_options(**options)
        self._held = nn.Module()
        self._modules = {"held": self._held}
        self._held_ids: set[int] = set()
        self._fitted: Fitted | None = None

    def hand_over(self, graph: HandedGraph) -> GraphCall:
        """Take one more graph; return a callable that runs it."""

        def call(inputs: Sequence[Any]) -> Any:
            self._hold(inputs)
            if self._fitted is None:
                callee = Callee(HandedGraph.run_as_it_is, self._modules, "the compiled model")
                self._fitted = Fitted.as_a_whole(callee, self._options)
            return self._fitted((graph, *inputs), {})

        return call

    def _hold(self, inputs: Sequence[Any]) -> None:
        """Register the parameters of a graph with the callable."""
        for parameter in inputs:
            if isinstance(parameter, nn.Parameter) and id(parameter) not in self._held_ids:
                self._held.register_parameter(f"parameter{len(self._held_ids)}", parameter)
                self._held_ids.add(id(parameter))


_FAMILIES: weakref.WeakValueDictionary[int, _Family] = weakref.WeakValueDictionary()
"""By the identity of the options; the graphs keep theirs alive."""


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
    found = _FAMILIES.get(id(options)) or _Family(options)
    _FAMILIES[id(options)] = found
    return found
