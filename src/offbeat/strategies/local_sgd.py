"""LocalSGD: workers step alone and average their weights every few steps (also known as FedAvg).

    every step:               w_i ← the optimizer's step with g_i
    every `period` steps:     w_i ← (1/N) Σ w_j,   or Σ (n_j/n) w_j by the samples each has seen (weighted)

With period 1 and plain SGD it equals BSP. The optimizer's state (momentum, Adam's moments) stays local, but
with `first_moments` = p and `second_moments` = q, as in DES-LOC (arXiv 2505.22549, whose periods are 3 and 6
times the weights'):

    every p steps:            first moments (momentum, Adam's mean of gradients) ← their mean over all workers
    every q steps:            second moments (Adam's mean of squares, Adamax' maximum) ← their mean

A mean of first moments is limited to what a worker's own second moment allows [ours]: where this worker has
seen hardly any gradient, Adam would divide the others' by next to nothing (core/optimizer_moments.py).

With a codec, the change since the last average travels. All workers hold that average, the base:

    w_i ← base ← base + (1/N) Σ decoded(encoded(w_j − base))

Under elastic, averages are over the workers that are left, which keep their local steps; a lost worker's
local steps, and the stored errors of its error feedback, are lost with it. A newcomer starts from another
worker's weights, base and optimizer state, without stored errors. Not with `weighted`: fractions are
exchanged before the weights, and would not add up to 1 if a worker were lost in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from offbeat.codecs import CodecSetting
from offbeat.codecs.all_reduce import MeanAllReduce, check_elastic_codec
from offbeat.core.blocks import Layout
from offbeat.core.fields import Flag, Whole
from offbeat.core.optimizer_moments import FIRST, SECOND, average_moments, limit_first_moments
from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError


@dataclass
class LocalSGDState:
    """The step; with a codec, by block: the last average, and the changes since then."""

    step: int = 0
    base: list[Tensor] = field(default_factory=list)
    changes: list[Tensor] = field(default_factory=list, metadata={"saved": False})
    reduction: MeanAllReduce = field(default_factory=MeanAllReduce)  # of the changes
    has_base: bool = field(default=False, metadata={"saved": False})  # or the first step has not begun


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[LocalSGDState]):
    """Strategy of local steps that averages weights every `period` steps."""

    name = "local_sgd"
    summary = "step locally, average weights every `period` steps"

    codec: CodecSetting = None
    period: Annotated[
        int, Whole("steps from one average of the weights to the next", of="steps", at_least=1)
    ] = 8
    weighted: Annotated[bool, Flag("weight each worker by the samples it has seen")] = False
    first_moments: Annotated[
        int | None,
        Whole("steps between averages of the first moments; None: they stay local", of="steps", at_least=1),
    ] = None
    second_moments: Annotated[
        int | None,
        Whole("steps between averages of the second moments; None: they stay local", of="steps", at_least=1),
    ] = None

    @property
    def averages_moments(self) -> bool:
        return self.first_moments is not None or self.second_moments is not None

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(
            model, rowwise=self.codec is None and not self.weighted and not self.averages_moments
        )

    def init(self, replica: Replica) -> LocalSGDState:
        if self.codec is None:
            return LocalSGDState()
        blocks = replica.blocks
        return LocalSGDState(
            base=[torch.empty_like(block.weight) for block in blocks],
            changes=[torch.empty_like(block.weight) for block in blocks],
            reduction=MeanAllReduce.of_blocks(blocks, self.codec),
        )

    async def step(self, state: LocalSGDState, replica: Replica, port: Port) -> None:
        if state.step == 0 and self.codec and not state.has_base:  # all workers start with the same weights
            torch._foreach_copy_(state.base, [block.weight for block in replica.blocks])
            state.has_base = True  # an optimizer may move the weights, and begin this step again
        await replica.update(averages=True)
        state.step += 1
        if state.step % self.period == 0:
            fraction = await self._fraction(replica, port) if self.weighted else None
            if state.reduction.uses_codec(port):
                await self._average_changes(state, replica, port, fraction)
            else:
                await replica.average(port, fraction)
        for names, period in ((FIRST, self.first_moments), (SECOND, self.second_moments)):
            if period is not None and state.step % period == 0:
                if replica.members.sharded:
                    raise SettingError("averages of moments of a sharded model: leave the moments local")
                await average_moments(replica, port, names)
        if self.first_moments is not None and state.step % self.first_moments == 0:
            limit_first_moments(replica)

    @staticmethod
    async def _average_changes(
        state: LocalSGDState, replica: Replica, port: Port, fraction: float | None
    ) -> None:
        replica.keep_layout()
        changes = zip(replica.blocks, state.base, state.changes, strict=True)
        for number, (block, base, change) in enumerate(changes):
            torch.sub(block.weight, base, out=change)
            if fraction is not None:
                change.mul_(fraction * port.world)
            state.reduction.start(change, port, number)
        replica.buffers.start(port)
        await state.reduction.finish(port)
        for block, change in zip(replica.blocks, state.changes, strict=True):
            block.clear_gaps(change)  # entries between two parameters stay as they are
        torch._foreach_add_(state.base, state.changes)
        torch._foreach_copy_([block.weight for block in replica.blocks], state.base)
        await replica.buffers.finish()

    def check_elastic(self, minimum: int) -> None:
        check_elastic_codec(self.codec, minimum)
        if self.averages_moments:
            raise SettingError(
                "elastic=True with averages of moments: they travel in several operations, between which "
                "a worker may be lost; leave them local"
            )
        if self.weighted:
            raise SettingError(
                "elastic=True with weighted=True: fractions are exchanged before the weights, and would not "
                "add up to 1 if a worker were lost in between"
            )

    async def on_roster_change(
        self, state: LocalSGDState, replica: Replica, port: Port, newcomer: bool
    ) -> None:
        if newcomer:
            state.reduction.forget_errors()

    async def _fraction(self, replica: Replica, port: Port) -> float:
        """Return this worker's fraction of the samples that all workers have seen since the last average."""
        members = replica.members
        seen: float = (await members.total(members.vector(replica.inputs.take_samples()))).item()
        total = await port.all_reduce(replica.weights[0].new_tensor([seen], dtype=torch.float64), Op.SUM)
        return seen / float(total.item())
