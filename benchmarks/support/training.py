"""Training loops that several benchmarks share."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.experiments.tasks import task
from offbeat.worlds.processes.emulation import pace

BATCH = 32


def train_step(
    forward: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """Take one step of an ordinary classification loop; `forward` is the model, possibly wrapped."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(forward(inputs), targets).backward()
    optimizer.step()


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of random images of Fashion-MNIST's shape, with labels."""
    return torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))


class PacedTraining:
    """A Fashion-MNIST model under a strategy, whose computation takes a given time per step."""

    def __init__(self, model_name: str, strategy: Any, pace_s: float, factor: float = 1.0) -> None:
        torch.manual_seed(0)
        what = task("fashion-mnist", model=model_name)
        self.model = what.build()
        self.optimizer = what.optimizer(self.model)
        self.sync = offbeat.attach(self.model, self.optimizer, strategy, timeout_s=120)
        if pace_s:
            pace(self.model, pace_s, factor=factor)
        self.batch = random_batch()

    def step(self) -> None:
        train_step(self.model, self.optimizer, *self.batch)

    def steps(self, count: int) -> float:
        """Return the seconds per step, including the wait for communication still pending at the end."""
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        self.sync.settle()
        return (time.perf_counter() - start) / count

    def steps_in_time(self, stop_after: int | None, seconds: float) -> tuple[int, float]:
        """Train for `stop_after` steps, or if None for so many seconds; return steps and seconds."""
        start, steps = time.perf_counter(), 0
        while steps < stop_after if stop_after is not None else time.perf_counter() - start < seconds:
            self.step()
            steps += 1
        return steps, time.perf_counter() - start
