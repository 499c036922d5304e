"""Every private torch name that compiling needs, in one place: functional tracing and Inductor.

Tested on PyTorch 2.13 only. `joint_graph_passes` are rewrites of decomposed operators that Inductor
counts on: without them the gradient of a cross entropy, for one, is scattered element by element.
`compile_fx_inner` takes a functional graph with fake inputs, and returns a callable that takes a
list of tensors and empties it. Neither merges equal operators; the strides of outputs that are
marked as visible to the user stay.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

# Decisions of the plan stay: the order of operators, the layout of kept values.
_SETTINGS = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "layout_optimization": False,
    "triton.cudagraphs": False,
    "fallback_random": True,  # random operators draw the same numbers as eager
}


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """Hide deprecation warnings about PyTorch itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def trace_functional(
    function: Callable[..., list[Any]], inputs: Sequence[torch.Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """Trace a function into a graph without in-place operators, in the form Inductor wants.

    Operators that appear twice stay twice.

    `function`: takes the tensors one by one; returns a list of tensors. `inputs`: fake tensors of
    `mode`.
    """
    with _without_deprecations():
        import torch._inductor.lowering  # some decompositions ask it
        from torch._inductor.decomposition import select_decomp_table

    with mode, torch.no_grad(), _without_deprecations():
        module = make_fx(
            functionalize(function, remove="mutations"), decomposition_table=select_decomp_table()
        )(*inputs)
        return _rewritten(module, mode)


def _rewritten(module: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """Return the graph after the rewrites that Inductor's lowerings count on."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with config.patch(_SETTINGS), V.set_fake_mode(mode):
        return joint_graph_passes(module)


def compile_graph(
    module: fx.GraphModule, *, backward: bool, donated: Sequence[int] = ()
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a functional graph of tensors with Inductor.

    `module`: placeholders and outputs are tensors; nodes carry their fake results. `backward`:
    whether it belongs to the backward pass. `donated`: inputs, of the backward pass, whose memory
    is not needed afterwards: kernels may write their results there. It takes a list of tensors,
    which it empties; returns the outputs.
    """
    with _without_deprecations():
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

    graph = module.graph
    output = graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in inputs), None)
    with (
        config.patch(_SETTINGS),
        _donating(donated, mode),
        torch.no_grad(),
        _without_deprecations(),
    ):
        return compile_fx_inner(module, inputs, is_backward=backward)  # type: ignore[return-value]


@contextlib.contextmanager
def _donating(donated: Sequence[int], mode: FakeTensorMode | None) -> Iterator[None]:
    """Tell Inductor, as AOTAutograd does, which inputs may be written over.

    Inductor's cache of compiled graphs does not look at that: the tag keeps them apart.
    """
    context = TracingContext(mode)
    metadata: Any = types.SimpleNamespace(bw_donated_idxs=list(donated), static_input_indices=[])
    context.fw_metadata = metadata
    tag = f"tightfit, donated {list(donated)}"
    with tracing(context), torch.compiler.config.patch(cache_key_tag=tag):
        yield
