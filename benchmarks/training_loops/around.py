"""What other code drives: two processes that share gradients, and the Trainer of transformers."""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training_loops.run import Run

__all__ = ["data_parallel", "trainer"]


_KEPT: list[nn.Module] = []
"""Until the process ends: PyTorch 2.13 hangs, rarely, where a wrapper is freed right after its last
step. Its group joins a thread then, holding the lock of Python that the thread waits for."""


def data_parallel(run: Run) -> None:
    """DistributedDataParallel over two processes with gloo."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{run.port}", rank=run.rank, world_size=2)
    torch.manual_seed(0)
    width, batch = run.size(32, 256), run.size(32, 256)
    model = nn.Sequential(
        nn.Linear(32, width),
        *(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(run.size(3, 8))
        ),
        nn.Linear(width, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)
    wrapped = DistributedDataParallel(model)

    torch.manual_seed(run.rank)
    for _ in range(run.steps):
        x, y = torch.randn(batch, 32), torch.randint(0, 10, (batch,))
        loss = F.cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)
    _KEPT.append(wrapped)
    dist.destroy_process_group()


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, count: int, length: int) -> None:
        self.rows = torch.randint(0, 200, (count, length))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(run: Run) -> None:
    """The Trainer of transformers on a small GPT-2, two micro-batches a step."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Watched(Trainer):
        """Keeps the loss of every micro-batch; those that are logged are rounded."""

        losses: ClassVar[list[float]] = []

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    class Notes(TrainerCallback):
        """Ends the step of the run with that of the Trainer."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.note(*Watched.losses)
            Watched.losses.clear()

    width, length = run.size(16, 128), run.size(16, 96)
    config = GPT2Config(
        vocab_size=200,
        n_positions=length,
        n_embd=width,
        n_layer=run.size(1, 4),
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    batch = run.size(2, 8)
    texts = Texts(2 * batch * run.steps, length)

    run.fit(model)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Watched(model=model, args=arguments, train_dataset=texts, callbacks=[Notes()]).train()
    run.trained(model)
