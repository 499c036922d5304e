"""Each integration trains three steps under the real library, with the bits of its plain run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.libraries import WARNINGS, Sentences, llama, padded
from tightfit.errors import BadInput

pytestmark = pytest.mark.filterwarnings(*WARNINGS)

QUICK = {"costs": "unit", "limits": (0.5, 0.05), "cache": False}


def equal(mine: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(mine.state_dict().values(), plain.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def trained_by_hugging_face(folder: Path, callbacks: Sequence[Any]) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        llama(),
        arguments,
        train_dataset=Sentences(),
        data_collator=padded,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def test_a_trainer_of_hugging_face_takes_a_budget_and_logs_its_peaks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tightfit.integrations.hugging_face import Budget

    plain = trained_by_hugging_face(tmp_path / "plain", [])
    mine = trained_by_hugging_face(tmp_path / "mine", [Budget("64MiB", **QUICK)])
    assert equal(mine.model, plain.model)
    losses = [
        [line["loss"] for line in t.state.log_history if "loss" in line] for t in (mine, plain)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    logged = mine.state.log_history[-1]
    assert 0 < logged["measured_peak_bytes"] <= 64 << 20
    assert 0 < logged["planned_peak_bytes"] <= 64 << 20
    late = Budget("64MiB", **QUICK)
    with pytest.raises(BadInput, match="came too late"):
        late.on_train_begin(None, None, None)


def trained_by_lightning(folder: Path, callbacks: Sequence[Any]) -> Any:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(0)
    module = Classifier()
    batches = [(torch.randn(64, 64), torch.randint(0, 4, (64,))) for _ in range(3)]
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer


def test_a_trainer_of_lightning_takes_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    from tightfit.integrations.environment import lightning_callbacks
    from tightfit.integrations.lightning import Budget

    plain = trained_by_lightning(tmp_path / "plain", [])
    mine = trained_by_lightning(tmp_path / "mine", [Budget("64MiB", **QUICK)])
    assert equal(mine.lightning_module, plain.lightning_module)
    assert 0 < mine.logged_metrics["measured_peak_bytes"] <= 64 << 20
    with pytest.raises(BadInput, match="known: model"):
        Budget("64MiB", module="net").setup(mine, mine.lightning_module, "fit")
    monkeypatch.delenv("TIGHTFIT_BUDGET", raising=False)
    assert lightning_callbacks() == []
    monkeypatch.setenv("TIGHTFIT_BUDGET", "64MiB")
    assert isinstance(*lightning_callbacks(), Budget)


LIMITED = """
import sys, pytest

def test_nothing_is_touched_unless_it_is_used():
    assert "torch" not in sys.modules

@pytest.mark.training_memory("1MiB")
@pytest.mark.parametrize("kib", [500, 2000])
def test_limited(kib):
    import torch
    torch.ones(kib, 256)

@pytest.mark.training_memory("1 parsec")
def test_wrong():
    pass
"""


def test_a_mark_limits_what_a_test_may_allocate(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LIMITED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-v", "--strict-markers", "test_it.py"),
            *("-p", "tightfit.integrations.pytest_plugin", "-p", "no:cacheprovider"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "was limited to 1.00 MiB but held 1.95 MiB" in done.stdout
    assert "unknown unit 'parsec'" in done.stdout
