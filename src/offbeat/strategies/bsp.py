"""BSP: bulk-synchronous parallel, the baseline that all others are measured against.

    every step:  ḡ = (1/N) Σ g_i;  one update, the same on all workers

Blocks are averaged as backward completes them, so that sending hides behind the rest of backward, as in
torch's DistributedDataParallel, which this equals bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from offbeat.port import Pending, Port
from offbeat.replica import Block, Replica
from offbeat.strategy import Strategy


@dataclass
class Reductions:
    flying: list[Pending[Tensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BSP(Strategy[Reductions]):
    """Average gradients at every step."""

    name = "bsp"
    summary = "average gradients at every step, overlapping backward (what DDP does)"
    replicas_agree = True

    def init(self, replica: Replica) -> Reductions:
        return Reductions()

    def ready(self, state: Reductions, replica: Replica, block: Block, port: Port) -> None:
        state.flying.append(port.reduce(block.marked))
        if block is replica.blocks[-1]:  # statistics are small: behind the gradients they delay nothing
            replica.statistics.start(port)

    async def step(self, state: Reductions, replica: Replica, port: Port) -> None:
        for block, reduction in zip(replica.blocks, state.flying, strict=True):
            await reduction
            block.hand_out()
        state.flying.clear()
        await replica.statistics.finish()
        await replica.update()
