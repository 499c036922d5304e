"""What loops on a GPU do besides: scaled gradients, fused steps, pinned batches, other streams.

On a CPU the same loops run without what it does not have:

    python benchmarks/loops.py scaled_gradients fused_steps --device cuda
"""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.training_loops.run import Run

__all__ = [
    "data_on_the_device",
    "fused_steps",
    "pinned_batches",
    "prefetched_batches",
    "restored",
    "scaled_gradients",
    "steps_in_backward",
]

CLASSES = 10
WORDS = 4096


class Convolutions(nn.Module):
    """cuDNN's convolutions and BatchNorm, ReLU in place, dropout."""

    def __init__(self, width: int, depth: int = 6) -> None:
        super().__init__()
        channels = [3, *[width] * depth]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(channels):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Words(nn.Module):
    """A language model of PyTorch's own layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        x = self.words(text)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def convolutions(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Convolutions(run.size(8, 64)).to(run.device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def drawn_images(run: Run, batches: int = 1, device: str | None = None) -> tuple[Tensor, Tensor]:
    side, count = run.size(16, 64), batches * run.size(4, 64)
    device = device or run.device
    images = torch.randn(count, 3, side, side, device=device)
    return images, torch.randint(0, CLASSES, (count,), device=device)


def scaled_gradients(run: Run) -> None:
    """Autocast with a GradScaler, channels last, and clipped gradients."""
    model, optimizer = convolutions(run)
    model = model.to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler(run.device)
    dtype = torch.bfloat16 if run.device == "cpu" else torch.float16

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        images, classes = drawn_images(run)
        images = images.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(run.device, dtype):
            loss = F.cross_entropy(model(images), classes)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.note(loss)
    run.trained(model)


def fused_steps(run: Run) -> None:
    """A language model under autocast with a fused AdamW and a schedule."""
    model = Words(run.size(32, 512), run.size(2, 6)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    run.fit(model, optimizer=optimizer)

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(run.steps):
        text = torch.randint(0, WORDS, run.size((2, 16), (16, 256)), device=run.device)
        with torch.autocast(run.device, torch.bfloat16):
            loss = F.cross_entropy(model(text).flatten(0, 1).float(), text.flatten())
        run.step(loss, optimizer)
        schedule.step()
    run.trained(model)


def pinned_batches(run: Run) -> None:
    """Batches of a DataLoader in pinned memory, copied to the device while it works."""
    images, classes = drawn_images(run, batches=4, device="cpu")
    is_pinned = run.device != "cpu"
    data = TensorDataset(images, classes)
    loader = DataLoader(data, batch_size=len(images) // 4, pin_memory=is_pinned)
    model, optimizer = convolutions(run)

    run.fit(model, optimizer=optimizer)

    for _ in range(-(-run.steps // 4)):
        for batch in loader:
            x, y = (t.to(run.device, non_blocking=True) for t in batch)
            run.step(F.cross_entropy(model(x), y), optimizer)
    run.trained(model)


def prefetched_batches(run: Run) -> None:
    """The next batch is copied by a stream of its own while this one is trained on."""
    stream = torch.cuda.Stream() if run.device == "cuda" else None
    batches = [drawn_images(run, device="cpu")[0] for _ in range(3)]
    model, optimizer = convolutions(run)

    run.fit(model, optimizer=optimizer)

    def fetched(number: int) -> Tensor:
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            return batches[number % 3].to(run.device, non_blocking=True)

    following = fetched(0)
    for number in range(run.steps):
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
            following.record_stream(torch.cuda.current_stream())
        images, following = following, fetched(number + 1)
        run.step(model(images).square().mean(), optimizer)
    run.trained(model)


def data_on_the_device(run: Run) -> None:
    """The whole data set is on the device before the model is fitted; batches are drawn from it."""
    images, classes = drawn_images(run, batches=8)
    model, optimizer = convolutions(run)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        places = torch.randint(0, len(images), (len(images) // 8,), device=run.device)
        run.step(F.cross_entropy(model(images[places]), classes[places]), optimizer)
    run.trained(model)


def steps_in_backward(run: Run) -> None:
    """Each parameter is updated by AdamW as soon as its gradient is final."""
    model = Words(run.size(32, 512), run.size(2, 6)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer, update_in_backward=True)

    for _ in range(run.steps):
        text = torch.randint(0, WORDS, run.size((2, 16), (16, 256)), device=run.device)
        run.step(F.cross_entropy(model(text).flatten(0, 1), text.flatten()), optimizer)
    run.trained(model)


def restored(run: Run) -> None:
    """Model and optimizer are restored from a checkpoint on the host amid the training."""
    model, optimizer = convolutions(run)

    run.fit(model, optimizer=optimizer)

    for number in range(run.steps):
        images, classes = drawn_images(run)
        run.step(F.cross_entropy(model(images), classes), optimizer)
        if number == run.steps // 2:
            on_host = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            model.load_state_dict(on_host)
            optimizer.load_state_dict(optimizer.state_dict())
    run.trained(model)
