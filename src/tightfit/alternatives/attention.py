"""Attention by another kernel, forward and backward each by itself.

All kernels keep the same: queries, keys and values, the result, and the logarithm of the sum of
each row's exponentials. So the gradient may come from another kernel than the result did. On a CPU
there are the flash kernel and the formula, whose products are faster for a few tokens. On a GPU
also cuDNN's and the memory-efficient kernel; their results are compared and measured there (written
without a GPU, run by `tests/gpu`). Only without dropout, whose numbers differ, and without an added
mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView, arguments_of

aten = torch.ops.aten

_FEW = 128  # tokens: beyond, rows of the formula take more than all else on a CPU
_ROUNDED = 32  # the memory-efficient kernel's rows of logarithms are padded to this


def _formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    shares = _scores(query, key, causal, scale)
    logarithms = torch.logsumexp(shares, -1)
    shares.sub_(logarithms.unsqueeze(-1)).exp_()
    return shares @ value, logarithms


def _formula_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    made: torch.Tensor,
    logarithms: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    shares = _scores(query, key, causal, scale).sub_(logarithms.unsqueeze(-1)).exp_()
    of_value = shares.transpose(-1, -2) @ gradient
    of_scores = (gradient @ value.transpose(-1, -2)).sub_((gradient * made).sum(-1, keepdim=True))
    of_scores.mul_(shares).mul_(scale)
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, of_value


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = (query @ key.transpose(-1, -2)).mul_(scale)
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(ahead, -math.inf)
    return scores


def _flash(query: Any, key: Any, value: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    return aten._scaled_dot_product_flash_attention.default(
        query, key, value, 0.0, causal, scale=scale
    )[:2]


def _flash_gradients(
    gradient: Any, query: Any, key: Any, value: Any, made: Any, logarithms: Any, *how: Any
) -> tuple[Any, ...]:
    causal, scale = how
    none = query.new_empty(0, dtype=torch.int32)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    sizes = (none, none, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward.default(
        gradient, query, key, value, made, logarithms, *sizes, 0.0, causal, seed, seed[0],
        scale=scale,
    )  # fmt: skip


def _without_mask(operator: Any) -> Callable[..., tuple[Any, Any]]:
    """Return an operator that also takes a mask as a kernel without a mask."""

    def kernel(query: Any, key: Any, value: Any, causal: bool, scale: float) -> tuple[Any, Any]:
        return operator(query, key, value, None, True, 0.0, causal, scale=scale)[:2]

    return kernel


def _efficient_gradients(
    gradient: Any, query: Any, key: Any, value: Any, made: Any, logarithms: Any, *how: Any
) -> tuple[Any, ...]:
    causal, scale = how
    tokens = query.shape[2]
    padded = torch.nn.functional.pad(logarithms, (0, -tokens % _ROUNDED), value=math.inf)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    wanted = [True, True, True, False]
    return aten._scaled_dot_product_efficient_attention_backward.default(
        gradient, query, key, value, None, made, padded, seed, seed, 0.0, wanted, causal,
        scale=scale,
    )[:3]  # fmt: skip


def _cudnn_gradients(
    gradient: Any, query: Any, key: Any, value: Any, made: Any, logarithms: Any, *how: Any
) -> tuple[Any, ...]:
    causal, scale = how
    none = query.new_empty(0, dtype=torch.int32)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    sizes = (none, none, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_cudnn_attention_backward.default(
        gradient, query, key, value, made, logarithms.unsqueeze(-1), seed, seed, None, *sizes,
        0.0, causal, scale=scale,
    )  # fmt: skip


@dataclass(frozen=True)
class _Kernel:
    """Kernels of attention and of its gradients, from rows of logarithms [N, heads, tokens]."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, ...]]


_KERNELS = {
    "formula": _Kernel(_formula, _formula_gradients),
    "flash": _Kernel(_flash, _flash_gradients),
    "efficient": _Kernel(
        _without_mask(aten._scaled_dot_product_efficient_attention.default), _efficient_gradients
    ),
    "cudnn": _Kernel(
        _without_mask(aten._scaled_dot_product_cudnn_attention.default), _cudnn_gradients
    ),
}

_FORWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: "cpu",
    aten._scaled_dot_product_flash_attention.default: "flash",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
    aten._scaled_dot_product_cudnn_attention.default: "cudnn",
}
_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "cpu",
    aten._scaled_dot_product_flash_attention_backward.default: "flash",
    aten._scaled_dot_product_efficient_attention_backward.default: "efficient",
    aten._scaled_dot_product_cudnn_attention_backward.default: "cudnn",
}
ATTENTION = (*_FORWARD, *_BACKWARD)


def attended(
    kernel: str,
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    *arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of a kernel, laid out as the default, and its rows of logarithms.

    `shape`: of the default's logarithms, which may be padded. `strides`: of the default's result
    and logarithms. `arguments`: query, key and value, [N, heads, tokens, width]; whether tokens see
    only earlier ones; the factor of the scores.
    """
    made, logarithms = _KERNELS[kernel].forward(*arguments)
    tokens = made.shape[2]
    rows = logarithms.flatten(2)[..., :tokens]
    if math.prod(shape) != rows.numel():
        rows = torch.nn.functional.pad(rows, (0, -tokens % _ROUNDED), value=math.inf)
    return _laid_out(made, strides[0]), _laid_out(rows.reshape(shape), strides[1])


def attention_gradients(
    kernel: str, strides: tuple[tuple[int, ...], ...], *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, laid out as the default's.

    `arguments`: the gradient of the result, query, key, value, the result, its logarithms in any
    kernel's form; whether tokens see only earlier ones; the factor of the scores.
    """
    *tensors, logarithms, causal, scale = arguments
    rows = logarithms.flatten(2)[..., : tensors[1].shape[2]].contiguous()
    made = _KERNELS[kernel].backward(*tensors, rows, causal, scale)
    return tuple(_laid_out(x, own) for x, own in zip(made, strides, strict=True))


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def attention(view: OpView) -> Extension | None:
    """Offer attention, or its gradients, by every other kernel of the device."""
    target = view.node.target
    own = _FORWARD.get(target) or _BACKWARD[target]
    named = dict(zip(_names(view), arguments_of(view.node), strict=False)) | view.node.kwargs
    query, key, value = named["query"], named["key"], named["value"]
    plain = not named["dropout_p"] and named.get("attn_mask") is named.get("attn_bias") is None
    sizes = query.meta["val"].shape
    alike = sizes[1] == key.meta["val"].shape[1] and sizes[3] == value.meta["val"].shape[3]
    if not plain or not alike or not query.meta["val"].numel():
        return None
    scale = named.get("scale")
    how = (named["is_causal"], sizes[3] ** -0.5 if scale is None else scale)
    if own == "cpu" and max(sizes[2], key.meta["val"].shape[2]) > _FEW:
        return None
    kernels = ("formula",) if own == "cpu" else tuple(k for k in _KERNELS if k != own)
    if target in _FORWARD:
        made, logarithms = view.node.meta["val"][:2]
        if not isinstance(logarithms, torch.Tensor) or logarithms.dim() < 3:
            return None
        function, outputs = attended, (0, 1)
        strides = tuple(made.stride()), tuple(logarithms.stride())
        fixed: tuple[Any, ...] = (tuple(logarithms.shape), strides)
        tensors = (query, key, value)
        rests_on: tuple[Any, ...] = ()
    else:
        gradient = named.get("grad_out", named.get("grad_out_"))
        function, outputs = attention_gradients, (0, 1, 2)
        fixed = (tuple(tuple(x.stride()) for x in view.node.meta["val"][:3]),)
        tensors = (gradient, query, key, value, named["out"], named["logsumexp"])
        forward = view.maker_of(named["logsumexp"], tuple(_FORWARD))
        rests_on = () if forward is None else (forward,)
    return Extension(
        tuple(
            Implementation(
                f"attention.{kernel}",
                function,
                (kernel, *fixed, *tensors, *how),
                outputs=outputs,
                exactness="rounding",
                rests_on=rests_on,
            )
            for kernel in kernels
        )
    )


def _names(view: OpView) -> list[str]:
    schema = view.node.target._schema  # type: ignore[union-attr]
    return [argument.name for argument in schema.arguments if not argument.kwarg_only]
