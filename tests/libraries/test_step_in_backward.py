"""The optimizer's step inside the plan under trainers that have loops of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tightfit
from support.libraries import WARNINGS, Sentences, images, llama, padded
from support.training import Net

pytestmark = pytest.mark.filterwarnings(*WARNINGS)

QUICK = {"costs": "unit", "cache": False, "limits": (1, 0.05)}


def of_transformers(folder: Path, *, fits: bool) -> Iterator[Tensor]:
    """Train by a `Trainer` that clips to a norm of 1, as it does by itself."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if fits:
        tightfit.fit(model, "8MiB", optimizer=optimizer, clip_grad_norm=1.0, **QUICK)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=2,
        max_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Sentences(),
        data_collator=padded,
        optimizers=(optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert all((p.grad is None) for p in model.parameters())
    yield from model.state_dict().values()


def of_lightning(folder: Path, *, fits: bool) -> Iterator[Tensor]:
    """Train by a trainer that steps with a closure."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if fits:
                keywords = {"optimizer": optimizer, "update_in_backward": True, **QUICK}
                tightfit.fit(self.model, "8MiB", **keywords)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(0)
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, images())
    assert all((p.grad is None) == fits for p in module.parameters())
    yield from module.state_dict().values()


@pytest.mark.parametrize(
    ("package", "way"), [("transformers", of_transformers), ("lightning", of_lightning)]
)
def test_a_trainer_has_the_same_bits(package: str, way, tmp_path: Path) -> None:
    pytest.importorskip(package)
    plain = [x.clone() for x in way(tmp_path, fits=False)]
    assert all(map(torch.equal, way(tmp_path, fits=True), plain))
