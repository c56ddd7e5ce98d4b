"""OSP on a linear model, whose weights are known by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import OSP
from tests.support import loops
from tests.support.limits import HANG_S

STEPS = 14
SIZES = (96, 64, 320, 128, 64, 256)  # floats of each parameter: 256 bytes and more, so each is a block


class Linear(nn.Module):
    """Σ w·c over the parameters; those whose coefficients are None are not used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        start = [torch.randint(-8, 9, (n,), generator=generator).float() for n in SIZES]
        self.parts = nn.ParameterList([nn.Parameter(w) for w in start])

    def forward(self, coefficients: list[Tensor | None]) -> Tensor:
        used = [(p * c).sum() for p, c in zip(self.parts, coefficients, strict=True) if c is not None]
        return torch.stack(used).sum()


Coefficients = list[list[Tensor | None]]


def coefficients(rank: int, steps: int = STEPS) -> Coefficients:
    """Small whole numbers, other ones on every rank, larger for later parameters."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        [torch.randint(-4, 5, (n,), generator=generator).float() * 2**i for i, n in enumerate(SIZES)]
        for _ in range(steps)
    ]


def all_used(rank: int) -> Coefficients:
    return coefficients(rank)


def some_unused(rank: int) -> Coefficients:
    """One parameter is never used; others on one rank only, or on none, in some steps."""
    steps = coefficients(rank)
    for t, step in enumerate(steps):
        step[1] = None
        if t % 3 == rank:
            step[3] = None
        if t % 4 == 3:
            step[4] = None
    return steps


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, fused=True)


def by_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 2.0**-i} for i, p in enumerate(model.parameters())])


MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": plain,
    "fused": fused,
    "groups": by_group,
    "momentum": loops.momentum,
    "adamw": loops.adamw,
}


class Play:
    """A run on the linear loss, step by step."""

    def __init__(self, strategy: offbeat.Strategy[Any], optimizer: str = "plain") -> None:
        self.rank = dist.get_rank()
        self.model = Linear()
        self.optimizer = MAKE[optimizer](self.model)
        self.sync = offbeat.attach(self.model, self.optimizer, strategy, timeout_s=HANG_S)

    @property
    def state(self) -> Any:
        return self.sync._session.conductor.state

    @property
    def late(self) -> list[int]:
        """The parameters that come late in the step to come; blocks lie in backward order."""
        return sorted(len(SIZES) - 1 - i for i in getattr(self.state, "late", []))

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parts]

    def agreed(self) -> list[Tensor]:
        self.sync.settle()
        with self.sync.consensus():
            return self.weights()

    def backward(self, step: list[Tensor | None], scale: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.optimizer.zero_grad()
        scale(self.model(step)).backward()

    def step(self, step: list[Tensor | None]) -> None:
        self.backward(step)
        self.optimizer.step()


@contextmanager
def played(strategy: offbeat.Strategy[Any], optimizer: str = "plain") -> Iterator[Play]:
    play = Play(strategy, optimizer)
    with play.sync:
        yield play


def trained_by_osp(
    strategy: offbeat.Strategy[Any], optimizer: str, data: Callable[[int], Coefficients], schedule: bool
) -> tuple[list[Tensor], list[list[int]]]:
    lates = []
    with played(strategy, optimizer) as play:
        scheduler = torch.optim.lr_scheduler.StepLR(play.optimizer, 1, 0.5 if schedule else 1.0)
        for step in data(play.rank):
            lates.append(play.late)
            play.step(step)
            scheduler.step()
        return play.agreed(), lates


LATE = OSP(budget=0.7, growth=0)
