"""LocalSGD: workers step by themselves and average their weights now and then (also known as FedAvg).

    every step:               w_i ← the optimizer's step with g_i
    every `period` steps:     w_i ← (1/N) Σ w_j,   or Σ (n_j/n) w_j by the samples each has seen (weighted)

With period 1 and plain SGD it equals BSP. The optimizer's state (momentum, Adam's moments) stays local.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.errors import SettingError
from offbeat.port import Op, Port
from offbeat.replica import Replica
from offbeat.strategy import Strategy


@dataclass
class Clock:
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[Clock]):
    """Average weights every `period` steps."""

    name = "local_sgd"
    summary = "step locally, average weights every `period` steps"

    period: int = 8
    weighted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.period, int) or self.period < 1:
            raise SettingError(f"period={self.period!r}: a whole number of steps, at least 1")

    def init(self, replica: Replica) -> Clock:
        return Clock()

    async def step(self, state: Clock, replica: Replica, port: Port) -> None:
        await replica.update()
        state.step += 1
        if state.step % self.period == 0:
            await replica.average(port, await self._share(replica, port) if self.weighted else None)

    async def _share(self, replica: Replica, port: Port) -> float:
        """What this worker counts for: its part of the samples that all have seen since the last average."""
        seen = replica.take_samples()
        total = await port.reduce(replica.weights[0].new_tensor([seen], dtype=torch.float64), Op.SUM)
        return seen / total.item()
