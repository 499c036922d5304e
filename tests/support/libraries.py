"""Ways of training under other libraries; each gets a function that fits a model or leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.real_models import untrained
from support.training import Net

WARNINGS = (
    "ignore:.gradient_checkpointing. is deprecated:FutureWarning:transformers.training_args",
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning:transformers.modeling_utils",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning:lightning.pytorch",
    "ignore:Precision bf16-mixed is not supported by the model:UserWarning:lightning.pytorch",
    "ignore:hooks on module 'model.embed_tokens' are captured:UserWarning:tightfit.execution",
)
"""What libraries deprecate of themselves and of PyTorch, and what tightfit says of their hooks."""

Fit = Callable[[nn.Module, "torch.optim.Optimizer | None"], nn.Module]


@dataclass(frozen=True)
class Library:
    """A way of training under a library: what it covers, what must be installed, what it runs."""

    name: str
    covers: str
    packages: tuple[str, ...]
    way: Callable[[Fit, Path], Iterator[Any]]


LIBRARIES: list[Library] = []


def library(name: str, covers: str, *packages: str):
    """Put a way of training into the table."""

    def add(way):
        LIBRARIES.append(Library(name, covers, packages, way))
        return way

    return add


def images() -> DataLoader:
    """Return images that take more than the scratch of a CPU's convolutions in bfloat16."""
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 3, 16, 16, generator=made), torch.randint(0, 4, (48,), generator=made)
    return DataLoader(TensorDataset(x, y), batch_size=16)


class Sentences(torch.utils.data.Dataset):
    """Token lists of two lengths."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(3, 50, (24 + 8 * (i % 2),), generator=made) for i in range(16)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def llama() -> nn.Module:
    return untrained(
        "LlamaForCausalLM",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


@library(
    "transformers",
    "`Trainer`: bfloat16, accumulation, clipping, padded lengths, evaluation between steps, "
    "`gradient_checkpointing`, saving (tied weights), generation",
    "transformers",
    "accelerate",
)
def trainer(fit: Fit, folder: Path) -> Iterator[Any]:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model = llama()
    fit(model, None)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=True,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    sentences = Sentences()
    made = Trainer(
        model, arguments, train_dataset=sentences, eval_dataset=sentences, data_collator=padded
    )
    made.remove_callback(PrinterCallback)
    made.train()
    yield from (line[k] for line in made.state.log_history for k in line if k.endswith("loss"))
    model.save_pretrained(folder / "saved")
    yield from type(model).from_pretrained(folder / "saved").state_dict().values()
    yield model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    yield from model.state_dict().values()


@library(
    "Lightning",
    "`Trainer`: bfloat16, accumulation, clipping, validation, checkpoints, averaged weights",
    "lightning",
)
def lightning(fit: Fit, folder: Path) -> Iterator[Any]:
    import lightning
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()
            self.losses: list[torch.Tensor] = []

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            self.log("loss", loss)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch, index):
            x, y = batch
            self.losses.append(F.cross_entropy(self(x), y))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    module = Classifier()
    fit(module.model, None)
    made = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[EMAWeightAveraging(decay=0.9)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(module, images(), images())
    yield from module.losses
    yield from module.state_dict().values()


@library(
    "accelerate",
    "`prepare` with bfloat16, `accumulate`, `clip_grad_norm_`, `unwrap_model`, copies of the "
    "prepared model",
    "accelerate",
)
def accelerate(fit: Fit, folder: Path) -> Iterator[Any]:
    import copy

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer)
    made = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    prepared, optimizer, batches = made.prepare(model, optimizer, images())
    for x, y in batches:
        with made.accumulate(prepared):
            loss = F.cross_entropy(prepared(x), y)
            made.backward(loss)
            if made.sync_gradients:
                yield made.clip_grad_norm_(prepared.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()
        del loss
    twin = copy.deepcopy(prepared)
    F.cross_entropy(twin(x), y).backward()
    yield from (p.grad for p in twin.parameters())
    plain = made.unwrap_model(prepared, keep_fp32_wrapper=False)
    with torch.no_grad():
        yield plain(x[:1])  # not in bfloat16, and compared with the twin
    yield from plain.state_dict().values()
    AcceleratorState._reset_state(True)


@library(
    "peft",
    "LoRA with dropout: frozen base weights, `modules_to_save`, merged and unmerged, a second "
    "adapter; outputs with a cache of keys and values",
    "peft",
    "transformers",
)
def peft(fit: Fit, folder: Path) -> Iterator[Any]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, modules_to_save=["norm"]
    )
    model = get_peft_model(llama(), config)
    fit(model, None)
    model.train()

    def steps(count: int) -> Iterator[torch.Tensor]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        for seed in range(count):
            torch.manual_seed(seed)
            tokens = torch.randint(3, 50, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            yield loss.detach()
            del loss
            optimizer.step()
            optimizer.zero_grad()

    yield from steps(2)
    model.merge_adapter()
    with torch.no_grad():
        yield model(input_ids=torch.tensor([[3, 4, 5]])).logits
    model.unmerge_adapter()
    yield from steps(1)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    yield from steps(2)
    yield from model.state_dict().values()


@library("PyTorch Geometric", "GCN, GAT and GIN on graphs of several sizes", "torch_geometric")
def geometric(fit: Fit, folder: Path) -> Iterator[Any]:
    from torch_geometric.nn import GATConv, GCNConv, GINConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = GCNConv(8, 16)
            self.second = GATConv(16, 8, heads=2)
            self.third = GINConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))

        def forward(self, x, edges):
            h = F.dropout(self.first(x, edges).relu(), 0.2, self.training)
            return self.third(self.second(h, edges).relu(), edges)

    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer)
    for seed, nodes in enumerate((60, 80, 60)):
        torch.manual_seed(seed)
        x, edges = torch.randn(nodes, 8), torch.randint(0, nodes, (2, 4 * nodes))
        loss = F.cross_entropy(model(x, edges), torch.randint(0, 4, (nodes,)))
        loss.backward()
        yield loss.detach()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    yield from model.state_dict().values()


@library("diffusers", "a U-Net with attention, trained on noise", "diffusers")
def diffusers(fit: Fit, folder: Path) -> Iterator[Any]:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
    )
    scheduler = DDPMScheduler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fit(model, optimizer)
    for seed in range(2):
        torch.manual_seed(seed)
        x, noise = torch.randn(2, 4, 3, 8, 8)
        times = torch.randint(0, 1000, (4,))
        loss = F.mse_loss(model(scheduler.add_noise(x, noise, times), times).sample, noise)
        loss.backward()
        yield loss.detach()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    yield from model.state_dict().values()
