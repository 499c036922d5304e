"""The zoo's models are the published ones: sizes, shapes, gradients, one numerical twin."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from tightfit.errors import BadInput
from tightfit.zoo import MODELS, Example, make
from tightfit.zoo.lstm import WordModel
from tightfit.zoo.unet import UNet, UNet3d

# Published: torchvision's tables, the papers of 3D U-Net (without BatchNorm's), Keras'
# MobileNet v1, OpenAI's GPT-2, Hugging Face's BertForMaskedLM. Computed here: FCN-8s, SegNet
# (papers: 134 M, 29.5 M), our word model.
PARAMETERS = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet": 6_624_904,
    "mobilenet_v1": 4_231_976,
    "mobilenet_v2": 3_504_872,
    "fcn8": 134_489_759,
    "segnet": 29_455_125,
    "gpt2": 124_439_808,
    "bert": 109_514_298,
    "vit": 86_567_656,
    "lstm": 14_448_400,
    "mlp_mixer": 59_880_472,
    "regnet": 5_495_976,
    "transformer": 63_082_496,
}
SMALL = {
    "resnet50": {"batch": 2, "size": 32},
    "vgg16": {"batch": 1, "size": 32},
    "vgg19": {"batch": 1, "size": 32},
    "googlenet": {"batch": 2, "size": 32},
    "mobilenet_v1": {"batch": 2, "size": 32},
    "mobilenet_v2": {"batch": 2, "size": 32},
    "unet": {"batch": 2, "size": (16, 32)},
    "unet3d": {"batch": 2, "size": 8},
    "fcn8": {"batch": 1, "size": 32},
    "segnet": {"batch": 2, "size": 32},
    "gpt2": {"batch": 1, "sequence": 4},
    "bert": {"batch": 1, "sequence": 4},
    "vit": {"batch": 1, "size": 32},
    "lstm": {"batch": 2, "sequence": 3},
    "mlp_mixer": {"batch": 1, "size": 32},
    "regnet": {"batch": 2, "size": 32},
    "fno": {"batch": 1, "size": 24},
    "ufno": {"batch": 2, "size": 24},
    "transformer": {"batch": 1, "sequence": 4},
}


def count(model: nn.Module, without: type[nn.Module] | None = None) -> int:
    skipped = {
        parameter
        for module in model.modules()
        if without is not None and isinstance(module, without)
        for parameter in module.parameters()
    }
    return sum(p.numel() for p in model.parameters() if p not in skipped)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    with torch.device("meta"):
        assert count(make(name, batch=1).model) == PARAMETERS[name]


def test_unets_count_as_published():
    with torch.device("meta"):
        assert count(UNet(channels=3, classes=1, width=32)) == 7_763_041
        assert count(UNet3d(), without=nn.BatchNorm3d) == 19_069_955


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_step_gives_every_parameter_a_gradient(name):
    torch.manual_seed(0)
    model, loss, args, target = make(name, **SMALL[name])
    assert model.training
    output = model(*args)
    value = output if loss is None else loss(output, target)
    assert value.shape == ()
    value.backward()
    assert torch.isfinite(value)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_can_be_built_without_memory(name):
    for setting in MODELS[name].settings:
        with torch.device("meta"):
            example = make(name, setting=setting)
        assert isinstance(example, Example)
        assert all(tensor.is_meta for tensor in example.args)


def test_the_word_model_is_an_lstm():
    """Same numbers as nn.LSTM with the same weights."""
    torch.manual_seed(0)
    model = WordModel(vocabulary=11, width=6, layers=2)
    reference = nn.LSTM(6, 6, num_layers=2, batch_first=True)
    with torch.no_grad():
        for layer, cell in enumerate(model.cells):
            getattr(reference, f"weight_ih_l{layer}").copy_(cell.of_input.weight)
            getattr(reference, f"bias_ih_l{layer}").copy_(cell.of_input.bias)
            getattr(reference, f"weight_hh_l{layer}").copy_(cell.of_hidden.weight)
            getattr(reference, f"bias_hh_l{layer}").zero_()
    words = torch.randint(0, 11, (3, 5))
    expected: Tensor = model.head(reference(model.words(words))[0])
    torch.testing.assert_close(model(words), expected)


def test_dropout_can_be_set():
    assert make("vgg16", 1, 32, dropout=0.0).model.classifier[2].p == 0.0
    assert make("gpt2", batch=1, sequence=4).model.blocks[0].attention.dropout == 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "resnet5"}, "no model 'resnet5' .known: bert, "),
        ({"name": "resnet50", "sequence": 4}, "takes no sequence .it takes: batch, size"),
        ({"name": "unet", "size": 100}, "size 100 does not fit.*multiples of 16"),
        ({"name": "vit", "batch": 0}, "batch of zoo model 'vit' must be positive, got 0"),
        ({"name": "gpt2", "setting": "monet"}, "no setting 'monet' .known: default"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(BadInput, match=message):
        make(**call)


def test_factories_can_be_called_with_the_batch_alone():
    assert inspect.signature(make).parameters["batch"].default is None
    assert make("mobilenet_v2", 3, 32).args[0].shape == (3, 3, 32, 32)
