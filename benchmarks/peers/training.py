"""Interface between a contender and the training loop that all contenders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.experiments.tasks import Batch, Task


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Model, optimizer and settings that a contender gets on each rank; gloo's default group is ready."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    rank: int
    world: int
    settings: Mapping[str, Any]

    def step(self, forward: nn.Module, optimizers: Sequence[Optimizer], batch: Batch) -> None:
        """Take one step of the usual loop; `forward` is the model, possibly wrapped."""
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.task.loss(forward, batch)
        loss.backward()
        self.task.clip(self.model)
        for optimizer in optimizers:
            optimizer.step()


def nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Training:
    """Operations of a contender during training.

    step          trains on a batch
    global_model  context manager inside which this rank's model is the global one; it changes nothing else
    wait_pending  waits for pending communication; this time counts as training
    leave         tells the others that this rank takes no more steps
    independent   ranks do not wait for each other: rank 0 may read the global model while others train
    """

    step: Callable[[Batch], Any]
    global_model: Callable[[], AbstractContextManager[Any]] = nullcontext
    wait_pending: Callable[[], Any] = nothing
    leave: Callable[[], Any] = nothing
    independent: bool = False


@contextmanager
def temporary_weights(model: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    """Give the model other weights inside a `with` block."""
    with torch.no_grad():
        own = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
        yield
        for parameter, weight in zip(model.parameters(), own, strict=True):
            parameter.copy_(weight)


def averaged_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Give every rank's model the mean of all ranks' weights inside a `with` block."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = zip(flat.div_(dist.get_world_size()).split(sizes), model.parameters(), strict=True)
    return temporary_weights(model, [part.view_as(parameter) for part, parameter in parts])
