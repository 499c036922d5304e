"""Recurrent modules of several layers: each layer is one op, so that it can be computed again.

PyTorch runs the layers of an LSTM, GRU or RNN one after the other. On a CPU every bit is the same
whether it does so inside one call or in several. Cut in time the bits would change: the input's
share of all gates is one product of matrices over all steps, and so are the gradients of weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tightfit.capture.opaque.mark import is_marked
from tightfit.torch_private import recurrent as private


def can_be_cut(module: nn.Module) -> bool:
    """Whether a module is a recurrent one of several layers, all trained, on a CPU."""
    return (
        isinstance(module, nn.RNNBase)
        and type(module) in (nn.LSTM, nn.GRU, nn.RNN)
        and module.num_layers > 1
        and not has_computed_weights(module)
        and all(p.requires_grad and p.device.type == "cpu" for p in module.parameters())
    )


def has_computed_weights(module: nn.Module) -> bool:
    """Whether some weights of a recurrent module are no parameters: its user computes them."""
    return type(module) in (nn.LSTM, nn.GRU, nn.RNN) and private.has_computed_weights(module)


def takes_computed_weights(module: nn.Module) -> bool:
    """Whether such weights are arguments of the module's op; a marked module holds them."""
    return has_computed_weights(module) and not is_marked(module)


def shapes_alone(module: nn.RNNBase, args: Any, kwargs: Any) -> Any:
    """Return outputs of a recurrent module, without memory, for inputs without memory."""
    return _like(module, module.input_size, module.num_layers, module.dropout)(*args, **kwargs)


class OfGivenWeights(nn.Module):
    """A recurrent module that is given all its weights with its input.

    `module`: one of the same kind, size and mode.
    """

    def __init__(self, module: nn.RNNBase) -> None:
        super().__init__()
        self._like = (_like(module, module.input_size, module.num_layers, module.dropout),)

    def forward(self, weights: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run it with weights in the order in which kernels take them."""
        (module,) = self._like
        with private.with_weights(module, weights):
            return module.forward(*args, **kwargs)


class RecurrentLayers:
    """The layers of a recurrent module, as modules of one layer that share its parameters.

    `module`: see `can_be_cut`.
    """

    def __init__(self, module: nn.RNNBase) -> None:
        self._module = module
        self._directions = 2 if module.bidirectional else 1
        self.names = [_names(module, number) for number in range(module.num_layers)]
        self.layers = [_layer(module, number, names) for number, names in enumerate(self.names)]

    def follows(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a call can be run layer by layer: a batch, nothing packed, nothing cast."""
        given = args[0] if args else kwargs.get("input")
        plain = isinstance(given, Tensor) and given.dim() == 3
        return plain and not torch.is_autocast_enabled("cpu")

    def parameters_now(self, number: int) -> dict[str, Tensor]:
        """Return the present parameters of the module, by their names in one layer."""
        return {own: getattr(self._module, name) for own, name in self.names[number].items()}

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Run the layers one after the other, with dropout between them."""
        module, states = self._module, []
        for number, layer in enumerate(self.layers):
            input, state = layer.forward(input, self._state(hx, number))
            states.append(state)
            if module.dropout and number + 1 < len(self.layers):
                input = torch.dropout(input, module.dropout, module.training)
        if isinstance(module, nn.LSTM):
            return input, tuple(torch.cat(each) for each in zip(*states, strict=True))
        return input, torch.cat(states)

    def _state(self, hx: Any, number: int) -> Any:
        if hx is None:
            return None
        start = number * self._directions
        if isinstance(hx, Tensor):
            return hx.narrow(0, start, self._directions)
        return tuple(each.narrow(0, start, self._directions) for each in hx)


def _names(module: nn.RNNBase, number: int) -> dict[str, str]:
    """Return the names of the parameters of one layer, by their names in a module of one layer."""
    ends = [f"_l{number}", f"_l{number}_reverse"]
    return {
        name.replace(end, end.replace(f"_l{number}", "_l0")): name
        for end in ends
        for name in module._parameters
        if name.endswith(end)
    }


def _layer(module: nn.RNNBase, number: int, names: dict[str, str]) -> nn.RNNBase:
    """Return a module of one layer that has the parameters of one layer of another."""
    directions = 2 if module.bidirectional else 1
    kept = module.proj_size or module.hidden_size
    layer = _like(module, module.input_size if number == 0 else kept * directions, 1)
    for own, name in names.items():
        setattr(layer, own, getattr(module, name))
    return layer


def _like(module: nn.RNNBase, width: int, layers: int, dropout: float = 0.0) -> nn.RNNBase:
    """Return a module of the same kind and mode whose weights have no memory."""
    options: dict[str, Any] = {
        "bias": module.bias,
        "batch_first": module.batch_first,
        "bidirectional": module.bidirectional,
        "dropout": dropout,
        "device": "meta",
    }
    if isinstance(module, nn.LSTM):
        options["proj_size"] = module.proj_size
    if isinstance(module, nn.RNN):
        options["nonlinearity"] = module.nonlinearity
    like = type(module)(width, module.hidden_size, layers, **options)
    return like.train(module.training)
