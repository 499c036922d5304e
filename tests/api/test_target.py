"""Models by name: what a factory may be, and one clear message for each way it can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tightfit.errors import BadInput
from tightfit.studies.dry_step import graph_of
from tightfit.studies.model import ModelSettings, load_example, loss_function, on_fake_tensors

GOOD = """
import torch
from torch import nn

def factory(batch=None):
    model = nn.Linear(3, 2)
    return model, nn.functional.mse_loss, (torch.ones(batch or 4, 3),), torch.zeros(batch or 4, 2)
"""


def file_with(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text, "utf-8")
    return f"{path}:factory"


def test_a_factory_in_a_file_is_called_with_the_batch(tmp_path: Path) -> None:
    example = load_example(file_with(tmp_path, GOOD), ModelSettings(batch=7))
    function, args, kwargs = loss_function(example)
    assert args[0].shape == (7, 3)
    assert function(*args, **kwargs).shape == ()


def test_a_factory_in_a_module_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models_here.py").write_text(GOOD, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_example("my_models_here:factory").args[0].shape == (4, 3)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text(GOOD, "utf-8")
    target = file_with(tmp_path, "from neighbour_of_mine import factory")
    assert load_example(target).args[0].shape == (4, 3)


def test_fake_tensors_take_no_memory() -> None:
    def huge():
        return nn.Linear(1 << 20, 1 << 20), None, (torch.ones(1, 1 << 20),), None

    example = on_fake_tensors(lambda: load_example(huge))
    assert next(example.model.parameters()).shape == (1 << 20, 1 << 20)


def test_a_layer_is_copied_on_fake_tensors_as_transformers_do() -> None:
    def stack():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, 2), nn.MSELoss(), (torch.ones(2, 3, 8),), None

    example = on_fake_tensors(lambda: load_example(stack))
    tensors = [*example.model.parameters(), *example.args]
    assert len({id(tensor.fake_mode) for tensor in tensors}) == 1
    assert example.model(*example.args).shape == (2, 3, 8)


def test_a_factory_that_reads_values_is_run_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    def reads():
        rates = [float(r) for r in torch.linspace(0, 1, 3)]
        return nn.Linear(len(rates), 1), None, (torch.ones(1, 3),), None

    example = on_fake_tensors(lambda: load_example(reads))
    assert type(example.args[0]) is torch.Tensor
    assert "making it for real" in capsys.readouterr().err


def test_a_loss_carried_by_the_output() -> None:
    class Carries(nn.Module):
        def forward(self, x):
            return {"loss": x.sum()}

    function, args, kwargs = loss_function(load_example((Carries(), None, {"x": torch.ones(2)}, 0)))
    assert function(*args, **kwargs) == 2
    function, args, kwargs = loss_function(load_example((nn.Identity(), None, ([1],), None)))
    with pytest.raises(BadInput, match="gave no loss and the model's output, a list"):
        function(*args, **kwargs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_to_be_found", r"importing .*mine.py failed: ModuleNotFound.*line 1"),
        ("def factory(:", r"importing .*mine.py failed: SyntaxError.*line 1"),
        ("exit(3)", r"importing .*mine.py failed: SystemExit: 3"),
        ("def model(): pass", r"has no 'factory' \(it defines: model\)"),
        ("factory = 3", "is an int, no factory: a factory returns"),
        ("def factory(batch=None):\n    return 1 / 0", r"ZeroDivisionError.*line 2: return 1 / 0"),
        ("def factory(batch=None): return 5", "returned an int; a factory returns"),
        (
            "def factory(batch=None): return 1, 2",
            "returned a tuple of 2: an int, an int; a factory",
        ),
        ("def factory(batch=None): return 1, 2, 3, 4", "the model of .* is an int"),
        (
            "from torch import nn\nfactory = lambda: (nn.ReLU(), 3, (), 0)",
            "the loss of .* is an int",
        ),
        (
            "from torch import nn\nfactory = lambda: (nn.ReLU(), None, 3, 0)",
            "the args of .* an int",
        ),
        (
            "import torch\nfactory = lambda: (torch.nn.ReLU(), None, torch.ones(1), 0)",
            r"are one tensor: put it into a tuple \(x,\)",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_example(file_with(tmp_path, text))


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("resnet50", {}, "names no model: write zoo:NAME, package.module:factory"),
        ("absent.py:factory", {}, "there is no file absent.py"),
        ("absent_package.models:factory", {}, "there is no module 'absent_package'"),
        ("zoo:absent", {}, "the zoo has no model 'absent'"),
        ("torch.nn:Linear", {"size": 3}, "size can be set for models of the zoo only"),
        ("torch.nn:Linear", {"batch": 0}, "the batch must be positive, got 0"),
        ("torch.nn:Identity", {}, "returned an Identity; a factory returns"),
        (lambda: None, {"batch": 3}, "takes no batch; write it as factory"),
        ((nn.ReLU(), None, (), None), {"batch": 3}, "batch= needs a factory"),
    ],
)
def test_what_is_wrong_with_a_target_is_said(target, options, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_example(target, ModelSettings(**options))


class SetUpLate(nn.Module):
    """Finds out what its labels are when it first runs, as classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.kind = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "regression"
        return (self.layer(x) + torch.arange(2)).square().sum()


def test_what_sets_itself_up_when_it_first_runs_is_captured_on_shapes() -> None:
    graph = graph_of(lambda: (SetUpLate(), None, (torch.ones(4, 3),), None), costs="unit")
    assert graph.ops
