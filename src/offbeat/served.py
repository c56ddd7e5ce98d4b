"""Served: the worker's half of all strategies that speak through a parameter server.

    w ← the optimizer's own step;   push (w − base)/N;   pull the server's weights, once its rule admits it
    base ← w ← what was pulled

The update that the worker's own optimizer made is pushed, scaled by 1/N, so any optimizer works. The pull
follows the push on the same way, so a read always holds the reader's own updates.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.port import Port
from offbeat.replica import Replica
from offbeat.rule import Rule
from offbeat.strategy import Strategy


@dataclass
class Reading:
    """How often this worker has pushed, and the weights that it last pulled."""

    clock: int
    base: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Served(Strategy[Reading]):
    """Push an update after every step, and pull."""

    @abstractmethod
    def rule(self) -> Rule[Any]: ...

    def init(self, replica: Replica) -> Reading:
        return Reading(clock=0, base=[weight.clone() for weight in replica.weights])

    async def step(self, state: Reading, replica: Replica, port: Port) -> None:
        if state.clock == 0:  # rank 0's weights came after `init`
            torch._foreach_copy_(state.base, replica.weights)
        await replica.update()
        state.clock += 1
        update = state.base  # not needed any more: the pull brings a new one
        for change, weight in zip(update, replica.weights, strict=True):
            torch.sub(weight, change, out=change).mul_(1 / port.world)
        pushed = port.push(update, state.clock)
        await port.pull(replica.weights, state.clock)
        await pushed
        torch._foreach_copy_(state.base, replica.weights)

    async def agree(self, state: Reading, replica: Replica, port: Port) -> None:
        await port.pull(replica.weights, None)
