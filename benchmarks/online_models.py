"""Programs that no static graph holds, and some that one does, for the online runtime.

Each factory returns a model and a function from the number of a step to its loss. Inputs, and
where it says so the program itself, differ from step to step.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.real_models import untrained

__all__ = ["PROGRAMS", "Program", "mlp"]

Program = tuple[nn.Module, Callable[[int], torch.Tensor]]


def seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def mlp(batch: int = 512, width: int = 128, depth: int = 16) -> Program:
    """Linear layers and ReLU."""
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(batch, width, generator=seeded(step))
        return model(x).square().mean()

    return model, loss_of


class Block(nn.Module):
    """A residual block with BatchNorm and ReLU in place."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(inplace=True),
            nn.Conv2d(wider, wider, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.across = nn.Identity()
        if stride > 1:
            across = nn.Conv2d(channels, wider, 1, stride, bias=False)
            self.across = nn.Sequential(across, nn.BatchNorm2d(wider))

    def forward(self, x):
        return F.relu_(self.inner(x) + self.across(x))


def resnet(batch: int = 8, blocks: int = 3) -> Program:
    """A residual network for small images, BatchNorm, ReLU in place."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(True)]
    channels = 16
    for stage, wider in enumerate((16, 32, 64)):
        for block in range(blocks):
            layers.append(Block(channels, wider, 2 if stage and not block else 1))
            channels = wider
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(batch, 3, 32, 32, generator=seeded(step))
        return F.cross_entropy(model(x), torch.arange(batch) % 10)

    return model, loss_of


def lstm(batch: int = 16, length: int = 24, width: int = 128) -> Program:
    """An LSTM cell over sequences whose length differs from step to step."""
    cell = nn.LSTMCell(64, width)

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(length + 4 * (step % 3), batch, 64, generator=seeded(step))
        h = c = torch.zeros(batch, width)
        loss = torch.zeros(())
        for now in x:
            h, c = cell(now, (h, c))
            loss = loss + h.square().mean()
        return loss

    return cell, loss_of


class TreeCell(nn.Module):
    """A binary TreeLSTM (Tai et al., 2015): the children's states become the parent's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)
        self.leaf = nn.Linear(width, 2 * width)

    def forward(self, tree, words):
        if isinstance(tree, int):
            return self.leaf(words[tree]).tanh().chunk(2, dim=1)
        (h_left, c_left), (h_right, c_right) = (self.forward(child, words) for child in tree)
        i, o, u, f_left, f_right = self.gates(torch.cat([h_left, h_right], 1)).chunk(5, dim=1)
        c = i.sigmoid() * u.tanh() + f_left.sigmoid() * c_left + f_right.sigmoid() * c_right
        return o.sigmoid() * c.tanh(), c


def tree_over(first: int, count: int, drawn: random.Random):
    """Return a random binary tree over some leaves."""
    if count == 1:
        return first
    left = drawn.randint(1, count - 1)
    return tree_over(first, left, drawn), tree_over(first + left, count - left, drawn)


def treelstm(batch: int = 16, width: int = 96, leaves: int = 24) -> Program:
    """A TreeLSTM; every step has another tree."""
    model = TreeCell(width)

    def loss_of(step: int) -> torch.Tensor:
        words = torch.randn(leaves, batch, width, generator=seeded(step))
        tree = tree_over(0, leaves, random.Random(step))
        return model(tree, words)[0].square().mean()

    return model, loss_of


def transformer(batch: int = 8, tokens: int = 48, width: int = 96, depth: int = 4) -> Program:
    """Encoder layers with dropout."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def loss_of(step: int) -> torch.Tensor:
        return model(torch.randn(batch, tokens, width, generator=seeded(step))).square().mean()

    return model, loss_of


class UNet(nn.Module):
    """Down and up again, with skips across."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        sizes = [channels << level for level in range(depth)]
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, size, 3, padding=1),
                nn.BatchNorm2d(size),
                nn.ReLU(inplace=True),
                nn.Conv2d(size, size, 3, padding=1),
                nn.ReLU(inplace=True),
            )
            for before, size in zip([3, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(size + 2 * size, size, 3, padding=1) for size in reversed(sizes[:-1])
        )
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for block in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)
            x = F.relu(block(x))
        return self.head(x)


def unet(batch: int = 4, size: int = 64) -> Program:
    """A U-Net with BatchNorm and ReLU in place."""
    model = UNet(8, 4)

    def loss_of(step: int) -> torch.Tensor:
        return model(torch.randn(batch, 3, size, size, generator=seeded(step))).square().mean()

    return model, loss_of


def gan(batch: int = 256, width: int = 64, unrolled: int = 4) -> Program:
    """A GAN whose generator looks some steps of the discriminator ahead (Metz et al., 2017).

    The gradient goes through the gradients of those steps.
    """

    def net(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, outputs),
        )  # fmt: skip

    model = nn.ModuleDict({"generator": net(16, 8), "critic": net(8, 1)})
    generator, critic = model["generator"], model["critic"]

    def loss_of(step: int) -> torch.Tensor:
        drawn = seeded(step)
        real = torch.randn(batch, 8, generator=drawn).tanh()
        fake = generator(torch.randn(batch, 16, generator=drawn))
        weights = dict(critic.named_parameters())

        def loss_with(weights, made):
            on_real = torch.func.functional_call(critic, weights, (real,))
            on_made = torch.func.functional_call(critic, weights, (made,))
            return F.softplus(-on_real).mean() + F.softplus(on_made).mean()

        own = loss_with(weights, fake.detach())
        for _ in range(unrolled):
            now = loss_with(weights, fake)
            slopes = torch.autograd.grad(now, list(weights.values()), create_graph=True)
            weights = {
                name: value - 0.1 * slope
                for (name, value), slope in zip(weights.items(), slopes, strict=True)
            }
        return own - loss_with(weights, fake)

    return model, loss_of


def language(model: nn.Module, batch: int, tokens: int, vocabulary: int) -> Program:
    model.train()

    def loss_of(step: int) -> torch.Tensor:
        ids = torch.randint(3, vocabulary, (batch, tokens), generator=seeded(step))
        return model(input_ids=ids, labels=ids).loss

    return model, loss_of


def mixtral() -> Program:
    """Mixtral: a router sends each token to 2 of 4 experts."""
    model = untrained(
        "MixtralForCausalLM",
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return language(model, 8, 48, 200)


def jetmoe() -> Program:
    """JetMoE: experts in attention, too; the sizes of their inputs are data."""
    model = untrained(
        "JetMoeForCausalLM",
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_key_value_heads=2,
        kv_channels=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return language(model, 8, 48, 200)


def nllb_moe() -> Program:
    """NLLB-MoE: an encoder and a decoder with experts, layers left out at random."""
    model = untrained(
        "NllbMoeForConditionalGeneration",
        vocab_size=200,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=4,
        expert_capacity=64,
        max_position_embeddings=64,
        use_cache=False,
    )
    return language(model, 8, 32, 200)


class Keypoints(nn.Module):
    """As SuperPoint: a score for every pixel, and descriptors where the scores are highest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.scores = nn.Conv2d(2 * width, 17, 1)
        self.descriptors = nn.Conv2d(2 * width, 64, 1)

    def forward(self, x):
        features = self.encoder(x)
        scores = F.pixel_shuffle(self.scores(features).softmax(1)[:, :-1], 4)[:, 0]
        highest = F.max_pool2d(scores, 9, 1, 4)
        described = F.normalize(self.descriptors(features), dim=1)
        found = []
        for n in range(len(x)):
            where = ((scores[n] == highest[n]) & (scores[n] > scores[n].mean())).nonzero()
            points = where.flip(1).to(x.dtype) / x.shape[-1] * 2 - 1
            taken = F.grid_sample(described[n : n + 1], points[None, None], align_corners=False)
            found.append((scores[n][where[:, 0], where[:, 1]], taken[0, :, 0]))
        return found


def superpoint(batch: int = 4, size: int = 64) -> Program:
    """Keypoints whose number is data, and their descriptors."""
    model = Keypoints(16)

    def loss_of(step: int) -> torch.Tensor:
        found = model(torch.randn(batch, 1, size, size, generator=seeded(step)))
        return torch.stack([s.sum() + d.square().mean() + d.mean() for s, d in found]).sum()

    return model, loss_of


class TestTimeTraining(nn.Module):
    """As TTT (Sun et al., 2024): the hidden state is a linear model that learns while it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(width, width) / width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.query = nn.Linear(width, width)

    def forward(self, chunks):
        weight, outputs = self.start, []
        for chunk in chunks:
            key, value = self.key(chunk), self.value(chunk)
            with torch.enable_grad():
                error = (key @ weight - value).square().mean()
                (slope,) = torch.autograd.grad(error, weight, create_graph=True)
            weight = weight - 10.0 * slope
            outputs.append(self.query(chunk) @ weight)
        return torch.cat(outputs)


def ttt(chunks: int = 12, rows: int = 128, width: int = 64) -> Program:
    """An inner loop that learns by gradients, inside the forward."""
    model = TestTimeTraining(width)

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(chunks, rows, width, generator=seeded(step))
        return (model(x) - x.flatten(0, 1)).square().mean()

    return model, loss_of


class Equilibrium(nn.Module):
    """As a deep-equilibrium model, unrolled: iterates until it stands still, however long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        z = torch.zeros_like(x)
        for _ in range(40):
            before, z = z, torch.tanh(self.norm(0.3 * self.inner(z) + x))
            if (z - before).norm() < 1e-3 * z.norm():
                break
        return self.outer(z)


def deq(batch: int = 256, width: int = 96) -> Program:
    """A fixed point, found by as many iterations as it takes."""
    model = Equilibrium(width)

    def loss_of(step: int) -> torch.Tensor:
        return model(torch.randn(batch, width, generator=seeded(step))).square().mean()

    return model, loss_of


PROGRAMS: dict[str, Callable[[], Program]] = {
    make.__name__: make
    for make in (
        mlp,
        resnet,
        lstm,
        treelstm,
        transformer,
        unet,
        gan,
        mixtral,
        jetmoe,
        nllb_moe,
        superpoint,
        ttt,
        deq,
    )
}
"""By name."""
