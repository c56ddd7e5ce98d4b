"""BSP: bulk-synchronous parallel, the baseline that all other strategies are measured against.

    every step:  ḡ = (1/N) Σ g_i;  one update, the same on all workers

Blocks are averaged as backward completes them, so that sending hides behind the rest of backward, as in
torch's DistributedDataParallel. The two agree bit for bit. A worker without others gathers nothing: each
gradient stays where autograd put it.

With a codec, packets travel instead: ḡ = (1/N) Σ decoded(encoded(g_i)), still the same on all workers.

Under elastic, ḡ is the mean over the workers of the roster in which it was committed. The stored errors of a
lost worker's error feedback are lost with it, and a newcomer starts without any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from offbeat.codecs import CodecSetting
from offbeat.codecs.all_reduce import GradientAllReduce, check_elastic_codec
from offbeat.core.blocks import Block, Layout
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy


@dataclass
class BSPState:
    """The gradients in flight, and the codec's memory of them."""

    gradients: GradientAllReduce


@dataclass(frozen=True, kw_only=True)
class BSP(Strategy[BSPState]):
    """Strategy that averages gradients at every step."""

    name = "bsp"
    summary = "average gradients at every step, overlapping backward (what DDP does)"
    identical_replicas = True

    codec: CodecSetting = None

    def layout(self, model: nn.Module) -> Layout:
        """Return larger blocks with a codec: the best number grows as the square root of the sending time."""
        layout = Layout.default(model, gradients=True, gathers_alone=False, rowwise=self.codec is None)
        fraction = 1.0 if self.codec is None else math.sqrt(self.codec.wire_ratio)  # of the usual number
        return replace(
            layout,
            first_bytes=int(layout.first_bytes / fraction),
            block_bytes=int(layout.block_bytes / fraction),
        )

    def init(self, replica: Replica) -> BSPState:
        return BSPState(GradientAllReduce.of(replica, self.codec))

    def ready(self, state: BSPState, replica: Replica, block: Block, port: Port) -> None:
        state.gradients.start(block, port)
        if block is replica.blocks[-1]:  # buffers are small: after the gradients they delay nothing
            replica.buffers.start(port)

    async def step(self, state: BSPState, replica: Replica, port: Port) -> None:
        await state.gradients.finish(port)
        await replica.buffers.finish()
        await replica.update()

    def check_elastic(self, minimum: int) -> None:
        check_elastic_codec(self.codec, minimum)

    async def on_roster_change(self, state: BSPState, replica: Replica, port: Port, newcomer: bool) -> None:
        if newcomer:
            state.gradients.reduction.forget_errors()
