"""A model that no static graph can hold: an LSTM over binary trees that differ from step to step.

tightfit record examples/train_over_trees.py --step 2 -o trees.log.gz
tightfit simulate trees.log.gz --ratio 0.4
"""

import random

import torch
from torch import Tensor, nn

WIDTH, BATCH, STEPS = 64, 64, 3


class TreeCell(nn.Module):
    """An LSTM cell with two children (Tai et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 5 * WIDTH)

    def forward(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]):
        gates = self.gates(torch.cat([left[0], right[0]], 1)).chunk(5, 1)
        enter, keep_left, keep_right, leave = map(torch.sigmoid, gates[:4])
        cell = enter * gates[4].tanh() + keep_left * left[1] + keep_right * right[1]
        return leave * cell.tanh(), cell


def state_of(cell: TreeCell, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Fold leaves [BATCH, WIDTH] over a random binary tree into one state."""
    if len(leaves) == 1:
        return leaves[0], torch.zeros_like(leaves[0])
    middle = random.randrange(1, len(leaves))
    return cell(state_of(cell, leaves[:middle]), state_of(cell, leaves[middle:]))


random.seed(0)
torch.manual_seed(0)
cell, head = TreeCell(), nn.Linear(WIDTH, 2)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
for step in range(STEPS):
    leaves = [torch.randn(BATCH, WIDTH) for _ in range(random.randrange(24, 48))]
    logits = head(state_of(cell, leaves)[0])
    loss = nn.functional.cross_entropy(logits, torch.randint(2, (BATCH,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {len(leaves)} leaves, loss {loss.item():.4f}")
