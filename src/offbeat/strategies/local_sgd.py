"""LocalSGD: workers step by themselves and average their weights now and then (also known as FedAvg).

    every step:               w_i ← the optimizer's step with g_i
    every `period` steps:     w_i ← (1/N) Σ w_j,   or Σ (n_j/n) w_j by the samples each has seen (weighted)

With period 1 and plain SGD it equals BSP. The optimizer's state (momentum, Adam's moments) stays local.

With a codec, what travels is what changed since the last average, which all workers hold:

    w_i ← base ← base + (1/N) Σ decoded(encoded(w_j − base))
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.codecs import Codec, Stream, exchange_and_finish
from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError


@dataclass
class LocalSGDState:
    step: int = 0
    base: list[Tensor] = field(
        default_factory=list
    )  # with a codec, by block: the weights of the last average
    wires: list[Stream] = field(default_factory=list)
    changes: list[Tensor] = field(default_factory=list, metadata={"saved": False})


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[LocalSGDState]):
    """Average weights every `period` steps."""

    name = "local_sgd"
    summary = "step locally, average weights every `period` steps"
    no_codec = ""

    period: int = 8
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.period, int) or self.period < 1:
            raise SettingError(f"period={self.period!r}: a whole number of steps, at least 1")

    def init(self, replica: Replica) -> LocalSGDState:
        if self.codec is None:
            return LocalSGDState()
        blocks = replica.blocks
        return LocalSGDState(
            base=[torch.empty_like(block.weight) for block in blocks],
            wires=[self.codec.stream(block.weight, block.matrices()) for block in blocks],
            changes=[torch.empty_like(block.weight) for block in blocks],
        )

    async def step(self, state: LocalSGDState, replica: Replica, port: Port) -> None:
        if state.step == 0 and self.codec:  # all start alike
            torch._foreach_copy_(state.base, [block.weight for block in replica.blocks])
        await replica.update()
        state.step += 1
        if state.step % self.period == 0:
            share = await self._share(replica, port) if self.weighted else None
            if self.codec and port.world > 1:
                await self._average_changes(self.codec, state, replica, port, share)
            else:
                await replica.average(port, share)

    @staticmethod
    async def _average_changes(
        codec: Codec, state: LocalSGDState, replica: Replica, port: Port, share: float | None
    ) -> None:
        replica.check_layout()
        sent = []
        for block, base, change, wire in zip(
            replica.blocks, state.base, state.changes, state.wires, strict=True
        ):
            torch.sub(block.weight, base, out=change)
            if share is not None:
                change.mul_(share * port.world)
            sent.append(codec.start(wire, change, port))
        replica.buffers.start(port)
        await exchange_and_finish(codec, state.wires, state.changes, port, sent)
        for block, change in zip(replica.blocks, state.changes, strict=True):
            block.clear_gaps(change)  # weights that are nobody's stay as they are
        torch._foreach_add_(state.base, state.changes)
        torch._foreach_copy_([block.weight for block in replica.blocks], state.base)
        await replica.buffers.finish()

    async def _share(self, replica: Replica, port: Port) -> float:
        """What this worker counts for: its part of the samples that all have seen since the last average."""
        seen = replica.inputs.take_samples()
        total = await port.all_reduce(replica.weights[0].new_tensor([seen], dtype=torch.float64), Op.SUM)
        return seen / total.item()
