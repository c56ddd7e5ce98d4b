"""A model whose weights count the updates that they hold.

Updates are whole numbers: each push adds 1 to every weight, so the weights tell how many pushes they hold.
"""

from __future__ import annotations

import torch
from torch import nn


class Counting(nn.Module):
    """Trained by `counting_optimizer`, every push of one of `world` workers adds 1 to all of its weights."""

    def __init__(self, world: int, numel: int = 50) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.world = world

    def forward(self) -> torch.Tensor:
        return -self.world * self.weight.sum()


def counting_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def count_on(model: Counting, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def counted(model: Counting) -> int:
    assert bool((model.weight == model.weight[0]).all()), "every push is there as a whole"
    return int(model.weight[0].item())
