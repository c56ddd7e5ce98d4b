"""BSP: bulk-synchronous parallel, the baseline that all others are measured against.

    every step:  ḡ = (1/N) Σ g_i;  one update, the same on all workers

Blocks are averaged as backward completes them, so that sending hides behind the rest of backward, as in
torch's DistributedDataParallel, which this equals bit for bit.

With a codec, packets travel instead: ḡ = (1/N) Σ decoded(encoded(g_i)), still the same on all workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from offbeat.codecs.all_reduce import GradientAllReduce
from offbeat.core.blocks import Block, Layout
from offbeat.core.pending import Pending
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy


@dataclass
class BSPState:
    flying: list[Pending[Tensor]] = field(default_factory=list)
    coded: GradientAllReduce | None = None


@dataclass(frozen=True, kw_only=True)
class BSP(Strategy[BSPState]):
    """Average gradients at every step."""

    name = "bsp"
    summary = "average gradients at every step, overlapping backward (what DDP does)"
    identical_replicas = True
    no_codec = ""

    def layout(self, model: nn.Module) -> Layout:
        """Return fewer blocks with a codec: the best number goes by the square root of the sending time."""
        layout = Layout.default(model, gradients=True)
        fewer = 1.0 if self.codec is None else math.sqrt(self.codec.wire_ratio)
        return replace(
            layout,
            first_bytes=int(layout.first_bytes / fewer),
            block_bytes=int(layout.block_bytes / fewer),
        )

    def init(self, replica: Replica) -> BSPState:
        return BSPState(coded=GradientAllReduce.of(replica, self.codec) if self.codec else None)

    def ready(self, state: BSPState, replica: Replica, block: Block, port: Port) -> None:
        if self.codec and state.coded and port.world > 1:  # alone there is nothing to send
            state.coded.start(self.codec, replica, port)
        else:
            state.flying.append(port.all_reduce(block.marked))
        if block is replica.blocks[-1]:  # statistics are small: behind the gradients they delay nothing
            replica.buffers.start(port)

    async def step(self, state: BSPState, replica: Replica, port: Port) -> None:
        if self.codec and state.coded and port.world > 1:
            await state.coded.finish(self.codec, replica, port)
        else:
            for block, reduction in zip(replica.blocks, state.flying, strict=True):
                await reduction
                block.hand_out()
            state.flying.clear()
        await replica.buffers.finish()
        await replica.update()
