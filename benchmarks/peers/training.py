"""What a contender gets, and what it gives to the loop that all share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.experiments.tasks import Batch, Task


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One rank's model, the same for every contender; gloo's default group is up."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    rank: int
    world: int
    settings: Mapping[str, Any]

    def step(self, forward: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
        """The usual loop's body. `forward` is the model, maybe wrapped."""
        optimizer.zero_grad()
        loss = self.task.loss(forward, batch)
        loss.backward()
        self.task.clip(self.model)
        optimizer.step()


def nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Training:
    """A contender at work.

    step      trains on a batch
    looking   inside, this rank's model is the global one; training goes on afterwards as if nobody had looked
    settle    waits for what is under way: it is training, and counts
    leave     says that this rank does no more steps, so that nobody waits for it
    alone     rank 0 may look while the others train on
    """

    step: Callable[[Batch], Any]
    looking: Callable[[], AbstractContextManager[Any]] = nullcontext
    settle: Callable[[], Any] = nothing
    leave: Callable[[], Any] = nothing
    alone: bool = False


@contextmanager
def showing(model: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    """Inside, the model has these weights."""
    with torch.no_grad():
        own = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
        yield
        for parameter, weight in zip(model.parameters(), own, strict=True):
            parameter.copy_(weight)


def averaged(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, every rank's model is the mean of all."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = zip(flat.div_(dist.get_world_size()).split(sizes), model.parameters(), strict=True)
    return showing(model, [part.view_as(parameter) for part, parameter in parts])
