"""A task for DiLoCo in virtual time: bowls, whose minima differ by worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offbeat.experiments.tasks.base import Batch, Data
from tests.support.loops import flat
from tests.support.virtual_runs import Kept

SIZE = 40  # five alignments of float64: of two fragments they have 2 and 3
CURVATURE = torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)
LR = 0.25


def target(worker: int) -> Tensor:
    return torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(worker))


@dataclass(frozen=True, kw_only=True)
class Bowls(Kept):
    """Each worker in a bowl of its own, ½ a (w − c_i)², under plain SGD; what was seen stays at hand."""

    w_local: list[list[Tensor]] = field(default_factory=list, compare=False)  # before each step
    published: list[Tensor] = field(default_factory=list, compare=False)  # as often as it was looked at

    def build(self) -> nn.Module:
        self.built.append(nn.ParameterList([nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))]))
        self.w_local.append([])
        return self.built[-1]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        worker = next(i for i, built in enumerate(self.built) if built is model)
        w = flat(model)
        self.w_local[worker].append(w)
        next(iter(model.parameters())).grad = CURVATURE * (w - target(worker))
        return torch.zeros(())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        self.published.append(flat(model))
        return 0.0

    def expect(self, history: list[list[Tensor]], published: list[Tensor]) -> None:
        """Expect each worker's weights before each step and after the last, and what was published."""
        for seen, model, expected in zip(self.w_local, self.built, history, strict=True):
            torch.testing.assert_close(
                torch.stack([*seen, flat(model)]), torch.stack(expected), rtol=1e-9, atol=1e-9
            )
        torch.testing.assert_close(torch.stack(self.published), torch.stack(published), rtol=1e-9, atol=1e-9)
