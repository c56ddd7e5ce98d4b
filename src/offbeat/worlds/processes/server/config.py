"""Post: what a server process is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.server.apply import MakeApply
from offbeat.server.messages import Tensors
from offbeat.server.optimizer_spec import OptimizerSpec, make_apply


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """What a server process is told on its command line, as JSON."""

    host: str
    port: int
    prefix: str  # of the store
    shard: int
    parent: int  # the process that started this one
    workers: int  # that must have come before anybody goes on
    neighbours: list[int]  # the workers of this host: what they get does not leave the NIC
    strategy: str
    settings: dict[str, Any]
    sizes: list[tuple[str, int]]  # the flat tensors of this shard: dtype and number of elements
    timeout_s: float
    optimizer: dict[str, Any] | None = None  # an `OptimizerSpec`, where workers push gradients
    snapshot: str  # the file
    snapshot_s: float  # how often
    dedicated: bool = False  # `offbeat serve` started it: stays for who comes back, keeps its snapshot

    @property
    def silence_s(self) -> float:
        """How long a worker may say nothing, while others wait for it: shorter than they would wait."""
        return self.timeout_s / 2

    def folding(self) -> MakeApply:
        """What makes pushes part of the weights."""
        return make_apply(OptimizerSpec(**self.optimizer) if self.optimizer else None)

    def report(self, wanted: int) -> Tensor:
        """Room for the numbers that come with a push: a gradient's rates and marks; what a rule wants."""
        told = len(self.optimizer["groups"]) + self.optimizer["marks"] if self.optimizer else 0
        return torch.zeros(told + wanted, dtype=torch.float64)

    def buffers(self) -> Tensors:
        return [torch.zeros(numel, dtype=getattr(torch, dtype)) for dtype, numel in self.sizes]
