"""The table of models: adding one is a file plus an entry here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.errors import BadInput
from tightfit.zoo.example import Example, ImageSize

_UNET = {"channels": 1, "classes": 2, "width": 32, "depth": 4}
_UNET_OF_PAPERS = {"channels": 3, "classes": 2, "width": 64, "depth": 4}
_FNO = {"width": 32, "modes": 12, "layers": 4}
_UFNO = {"width": 36, "modes": 12, "layers": 6}
_TRANSFORMER = {"width": 512, "heads": 8}


@dataclass(frozen=True)
class Entry:
    """A model of the zoo."""

    function: str  # ``"module:function"``; called with a setting as keywords
    # "default" has an activation peak of 200 to 700 MiB on a CPU, fresh gradients included; fcn8
    # has 0.9 GiB, gpt2 1.2 GiB, or 1.6 GiB with dropout. Others are those of a paper. Batch 1 in
    # "checkmate": that paper looks for the model's largest batch.
    settings: Mapping[str, Mapping[str, Any]]


MODELS: dict[str, Entry] = {
    "resnet50": Entry(
        "tightfit.zoo.resnet:resnet50",
        {
            "default": {"batch": 16, "size": 128},
            "monet": {"batch": 184, "size": 224},
            "checkmate": {"batch": 1, "size": 224},
        },
    ),
    "vgg16": Entry(
        "tightfit.zoo.vgg:vgg16",
        {
            "default": {"batch": 2, "size": 224, "dropout": 0.5},
            "channels_last": {"batch": 32, "size": 224, "dropout": 0.5, "channels_last": True},
            "monet": {"batch": 176, "size": 224, "dropout": 0.5},
            "checkmate": {"batch": 256, "size": 224, "dropout": 0.5},
        },
    ),
    "vgg19": Entry(
        "tightfit.zoo.vgg:vgg19",
        {
            "default": {"batch": 2, "size": 224, "dropout": 0.5},
            "checkmate": {"batch": 1, "size": 224, "dropout": 0.5},
        },
    ),
    "googlenet": Entry(
        "tightfit.zoo.googlenet:googlenet",
        {
            "default": {"batch": 16, "size": 160, "dropout": 0.2},
            "monet": {"batch": 320, "size": 224, "dropout": 0.2},
        },
    ),
    "mobilenet_v1": Entry(
        "tightfit.zoo.mobilenet:mobilenet_v1",
        {
            "default": {"batch": 16, "size": 128, "dropout": 0.0},
            "checkmate": {"batch": 512, "size": 224, "dropout": 0.0},
        },
    ),
    "mobilenet_v2": Entry(
        "tightfit.zoo.mobilenet:mobilenet_v2",
        {
            "default": {"batch": 8, "size": 128, "dropout": 0.2},
            "monet": {"batch": 272, "size": 224, "dropout": 0.2},
        },
    ),
    "unet": Entry(
        "tightfit.zoo.unet:unet",
        {
            "default": {"batch": 2, "size": 192, **_UNET},
            "monet": {"batch": 11, "size": (416, 608), **_UNET_OF_PAPERS},
            "checkmate": {"batch": 32, "size": (416, 608), **_UNET_OF_PAPERS},
        },
    ),
    "unet3d": Entry(
        "tightfit.zoo.unet:unet3d",
        {"default": {"batch": 1, "size": 40}, "monet": {"batch": 22, "size": 64}},
    ),
    "fcn8": Entry(
        "tightfit.zoo.segmentation:fcn8",
        {
            "default": {"batch": 1, "size": 160, "dropout": 0.5},
            "checkmate": {"batch": 1, "size": (416, 608), "dropout": 0.5},
        },
    ),
    "segnet": Entry(
        "tightfit.zoo.segmentation:segnet",
        {
            "default": {"batch": 2, "size": 160},
            "checkmate": {"batch": 1, "size": (416, 608)},
        },
    ),
    "gpt2": Entry(
        "tightfit.zoo.gpt2:gpt2",
        {"default": {"batch": 4, "sequence": 256, "dropout": 0.1}},
    ),
    "bert": Entry(
        "tightfit.zoo.bert:bert",
        {"default": {"batch": 8, "sequence": 128, "dropout": 0.1}},
    ),
    "vit": Entry(
        "tightfit.zoo.vit:vit",
        {"default": {"batch": 6, "size": 224, "dropout": 0.0}},
    ),
    "mlp_mixer": Entry(
        "tightfit.zoo.mixer:mlp_mixer",
        {"default": {"batch": 4, "size": 224}, "hiremate": {"batch": 64, "size": 224}},
    ),
    "regnet": Entry(
        "tightfit.zoo.regnet:regnet",
        {
            "default": {"batch": 16, "size": 128, "flops": "400MF"},
            "hiremate": {"batch": 32, "size": 224, "flops": "32GF"},
        },
    ),
    "fno": Entry(
        "tightfit.zoo.fourier:fno",
        {
            "default": {"batch": 8, "size": 96, **_FNO},
            "hiremate": {"batch": 64, "size": 256, **_FNO},
        },
    ),
    "ufno": Entry(
        "tightfit.zoo.fourier:ufno",
        {
            "default": {"batch": 6, "size": 64, **_UFNO},
            "hiremate": {"batch": 32, "size": 256, **_UFNO},
        },
    ),
    "transformer": Entry(
        "tightfit.zoo.transformer:transformer",
        {
            "default": {"batch": 4, "sequence": 128, "dropout": 0.1, "layers": 6, **_TRANSFORMER},
            "hiremate": {
                "batch": 16,
                "sequence": 256,
                "dropout": 0.1,
                "layers": 27,
                **_TRANSFORMER,
            },
        },
    ),
    "lstm": Entry(
        "tightfit.zoo.lstm:lstm",
        {"default": {"batch": 32, "sequence": 48}},
    ),
}


def make(
    name: str,
    batch: int | None = None,
    size: ImageSize | None = None,
    sequence: int | None = None,
    dropout: float | None = None,
    *,
    setting: str = "default",
) -> Example:
    """Return a model of the zoo in training mode with random inputs and target.

    `batch`, `size`, `sequence`, `dropout` replace values of the setting: examples per batch; side
    of an image in pixels, or (height, width); tokens per text; dropout probability. Raises
    `BadInput` for an unknown model or setting, for a value that the model does not take, and for a
    size that it cannot halve often enough.
    """
    if name not in MODELS:
        raise BadInput(f"the zoo has no model {name!r} (known: {', '.join(sorted(MODELS))})")
    entry = MODELS[name]
    if setting not in entry.settings:
        known = ", ".join(entry.settings)
        raise BadInput(f"zoo model {name!r} has no setting {setting!r} (known: {known})")
    chosen = dict(entry.settings[setting])
    given = {"batch": batch, "size": size, "sequence": sequence, "dropout": dropout}
    for key, value in given.items():
        if value is None:
            continue
        if key not in chosen:
            raise BadInput(f"zoo model {name!r} takes no {key} (it takes: {', '.join(chosen)})")
        if key != "dropout" and isinstance(value, int) and value < 1:
            raise BadInput(f"the {key} of zoo model {name!r} must be positive, got {value}")
        chosen[key] = value
    module, function = entry.function.split(":")
    return getattr(importlib.import_module(module), function)(**chosen)
