"""A detector under autocast, and one network that sees two views of every image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_loops.run import Run

__all__ = ["detector", "two_views"]


class Detector(nn.Module):
    """A small backbone, two maps of it, and heads for classes and boxes on both."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 2), conv(width, width, 1), conv(width, width, 1))
        self.next = nn.Sequential(conv(width, 2 * width, 2), conv(2 * width, 2 * width, 1))
        self.last = nn.Sequential(conv(2 * width, 2 * width, 2), conv(2 * width, 2 * width, 1))
        self.side = nn.Conv2d(2 * width, 2 * width, 1)
        self.classes = nn.Sequential(
            conv(2 * width, 2 * width, 1), nn.Conv2d(2 * width, classes, 1)
        )
        self.boxes = nn.Sequential(conv(2 * width, 2 * width, 1), nn.Conv2d(2 * width, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = self.next(self.stem(x))
        small = self.last(large)
        large = self.side(large) + F.interpolate(small, scale_factor=2)
        scores = [self.classes(level).flatten(2) for level in (large, small)]
        boxes = [self.boxes(level).flatten(2) for level in (large, small)]
        return torch.cat(scores, 2), torch.cat(boxes, 2)


def conv(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


def detector(run: Run) -> None:
    """A detector under autocast to bfloat16: focal loss for classes, smooth L1 for boxes."""
    side, batch, classes = run.size(32, 128), run.size(2, 8), 5
    model = Detector(run.size(8, 32), classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    run.fit(model, optimizer=optimizer)

    places = (side // 4) ** 2 + (side // 8) ** 2
    for _ in range(run.steps):
        images = torch.rand(batch, 3, side, side)
        wanted = (torch.rand(batch, classes, places) < 0.02).float()
        boxes = torch.rand(batch, 4, places)
        with torch.autocast(images.device.type, torch.bfloat16):
            scores, found = model(images)
            entropy = F.binary_cross_entropy_with_logits(scores.float(), wanted, reduction="none")
            focal = ((1 - torch.exp(-entropy)) ** 2 * entropy).sum() / wanted.sum().clamp(min=1)
            positive = wanted.amax(1, keepdim=True)
            regression = (
                F.smooth_l1_loss(found.float(), boxes, reduction="none") * positive
            ).mean()
            loss = focal + regression
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)


def two_views(run: Run) -> None:
    """Contrastive learning: two forwards of one network before one backward."""
    width, batch, side = run.size(8, 32), run.size(8, 32), run.size(16, 48)
    model = nn.Sequential(
        conv(3, width, 2),
        conv(width, width, 1),
        conv(width, 2 * width, 2),
        conv(2 * width, 2 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 32),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run.fit(model, optimizer=optimizer)

    for _ in range(run.steps):
        images = torch.rand(batch, 3, side, side)
        first = model(images + 0.1 * torch.randn_like(images))
        second = model(images.flip(-1))
        first, second = F.normalize(first), F.normalize(second)
        likeness = first @ second.t() / 0.1
        labels = torch.arange(batch)
        loss = F.cross_entropy(likeness, labels) + F.cross_entropy(likeness.t(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.note(loss)
    run.trained(model)
