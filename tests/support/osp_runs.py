"""OSP in virtual time, on layers whose gradients and sizes are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import OSP
from offbeat.core.replica import Replica
from offbeat.experiments.tasks.base import Batch
from offbeat.strategies.osp import OSPState
from offbeat.strategies.osp.split import hideable_bytes
from tests.support.virtual_runs import Layers

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Steps(Layers):
    """Parameters of some KiB, in forward order, whose gradients are constant, larger for earlier ones."""

    sizes_kib: tuple[int, ...] = (64, 16, 64)

    def build(self) -> nn.Module:
        sizes = [kib * KIB // 4 for kib in self.sizes_kib]
        self.built.append(nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes]))
        return self.built[-1]

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        for i, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 2.0**-i)
        return torch.zeros(())


@dataclass(frozen=True, kw_only=True)
class Watched(OSP):
    """OSP whose states stay at hand, one for each worker, with what each step planned."""

    states: list[OSPState] = field(default_factory=list, compare=False)
    lates: list[list[int]] = field(default_factory=list, compare=False)
    hidden: list[float] = field(default_factory=list, compare=False)

    def init(self, replica: Replica) -> OSPState:
        self.states.append(super().init(replica))
        return self.states[-1]

    def _split(self, state: OSPState, replica: Replica, port: Any, news: bool = True) -> None:
        super()._split(state, replica, port, news)
        if state is self.states[0]:
            self.lates.append(state.late)
            self.hidden.append(hideable_bytes(state.meter.compute_s, state.meter.bytes_per_s, port.world))


def sizes_of(task: Steps) -> list[int]:
    """Marked bytes of the blocks, in backward order."""
    return [kib * KIB + 4 for kib in reversed(task.sizes_kib)]


GRADIENT = {"importance": "gradient", "growth": 0}


@dataclass(frozen=True, kw_only=True)
class Many(Steps):
    """The last blocks of backward are the least important; each is a run of its own."""

    sizes_kib: tuple[int, ...] = (300,) * 10

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        for i, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 2.0**i)
        return torch.zeros(())


SIZES = sizes_of(Many())
TOTAL = sum(SIZES)
