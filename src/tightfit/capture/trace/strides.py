"""The true strides of results where fake kernels are wrong.

A step is traced on fake tensors. Some fake kernels give a result other strides than the real kernel
does (BatchNorm of a transposed input, kernels on images of one pixel). Everything traced after it
follows: copies appear or vanish, later kernels choose another path, sizes are wrong. Pricing runs
each distinct call for real. Where it sees other strides, the step is traced again with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tightfit.capture.nodes import flat_outputs, is_getitem
from tightfit.capture.opaque.tracing import is_opaque_operator
from tightfit.costs.measured.call import call_key
from tightfit.torch_private import core as private
from tightfit.torch_private.tracing.fake_kernels import corrected_fake_results

Strides = tuple[int, ...] | None
TrueStrides = Mapping[str, tuple[Strides, ...]]
"""By the key of a traced call: the strides of each of its results, None where they are right."""

_CALL = "tightfit_call"


def note_calls(graph: fx.Graph) -> None:
    """Note on each operator how it was called in the trace, before anything is rewritten.

    Opaque modules are left out: their results come from a real run.
    """
    for node in graph.nodes:
        if isinstance(node.target, private.OpOverload) and not is_opaque_operator(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            node.meta[_CALL] = _key(node.target, args, kwargs)


def with_true_strides(known: TrueStrides) -> Any:
    """Return a context in which the results of traced calls have the strides that are known."""
    if not known:
        return contextlib.nullcontext()
    names = {key.partition("\n")[0] for key in known}

    def correct(function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        if function.name() not in names:
            return result
        strides = known.get(_key(function, args, kwargs))
        if strides is None:
            return result
        if isinstance(result, torch.Tensor):
            return _laid_out(result, strides[0])
        return type(result)(map(_laid_out, result, strides))

    return corrected_fake_results(correct)


def misreported(node: fx.Node, measured: tuple[Strides, ...]) -> TrueStrides:
    """Return the true strides of one call if its fake kernel has them wrong; else nothing.

    `node`: an operator of a normalised trace. `measured`: the strides of its results in a real run.
    """
    if _CALL not in node.meta:
        return {}
    fakes = flat_outputs(node)
    wrong = tuple(
        strides if _differs(node, index, fake, strides) else None
        for index, (fake, strides) in enumerate(zip(fakes, measured, strict=False))
    )
    return {node.meta[_CALL]: wrong} if any(s is not None for s in wrong) else {}


def _differs(node: fx.Node, index: int, fake: Any, strides: Strides) -> bool:
    """Whether strides that matter differ.

    Those of a dimension of one element matter to the readers of the result: kernels choose between
    memory formats by them. They do not matter to autograd, which takes a gradient.
    """
    if not isinstance(fake, torch.Tensor) or strides is None or fake.numel() == 0:
        return False
    if len(strides) != fake.dim() or tuple(fake.stride()) == strides:
        return False
    if any(a != b for n, a, b in zip(fake.shape, fake.stride(), strides, strict=True) if n > 1):
        return True
    return any(user.op != "output" for user in _users(node, index))


def _users(node: fx.Node, index: int) -> list[fx.Node]:
    picks = [user for user in node.users if is_getitem(user)]
    if not picks:
        return list(node.users)
    return [user for pick in picks if pick.args[1] == index for user in pick.users]


def _key(function: private.OpOverload, args: Any, kwargs: Any) -> str:
    leaves = private.pytree.tree_leaves((list(args), dict(kwargs)))
    return call_key(function.name(), leaves)


def _laid_out(fake: Any, strides: Strides) -> Any:
    if strides is None or not isinstance(fake, torch.Tensor) or fake.dim() != len(strides):
        return fake
    return fake.new_empty_strided(fake.shape, strides)
