"""Served: the worker's half of all strategies that speak through a parameter server.

    w ← the optimizer's own step;   push (w − base)/N;   pull the server's weights, once its rule admits it
    base ← w ← what was pulled

The update that the worker's own optimizer made is pushed, scaled by 1/N, so any optimizer works. The pull
follows the push on the same way, so a read always holds the reader's own updates.

With a codec, the update travels as packets, one for each shard, which decodes them before it folds them in;
with error feedback what did not travel is added to the next update. Weights are pulled whole.

Where the rule's bound leaves room for it, the pull travels behind the next forward and backward: these see
the worker's own weights, with its own update in them; what was pulled is taken in when backward has ended.
Such a pull is asked for with the clock at which it will be used, so the bound holds for that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from offbeat.codecs import Codec, CodecField, ErrorFeedback
from offbeat.core.fields import Choice, Flag
from offbeat.core.finite import is_finite
from offbeat.core.gradients import copy_gradients, gradient_marks
from offbeat.core.port import Pending, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.server.rule import Rule

PUSHES = ("update", "gradient")


@dataclass
class PushPullState:
    """How often this worker has pushed, the weights that it last pulled, and what is under way."""

    clock: int
    base: list[Tensor]
    update: list[Tensor]
    kept: list[Tensor] = field(default_factory=list)  # with error feedback: what has not been sent yet
    form: int = 0  # in which the last push travels
    flying: list[Pending[Any]] = field(default_factory=list)  # a pull into `base`, and a push of `update`


@dataclass(frozen=True, kw_only=True)
class PushPull(Strategy[PushPullState]):
    """Push an update after every step, and pull."""

    codec: Annotated[
        Codec | None,
        CodecField(
            splittable="each shard of a server has a slice of the weights, and takes pushes one by one"
        ),
    ] = None
    push: Annotated[
        str, Choice("what is pushed: the update of the worker's optimizer, or the gradient", of=PUSHES)
    ] = "update"
    overlap: Annotated[bool, Flag("pull behind the next step's computation, where the bound allows it")] = (
        True
    )

    @property
    def forms(self) -> Sequence[Codec]:
        """To keep what was lost is a worker's own affair."""
        if self.codec is None:
            return ()
        return (self.codec.codec if isinstance(self.codec, ErrorFeedback) else self.codec,)

    @property
    def server_steps(self) -> bool:
        return self.push == "gradient"

    @abstractmethod
    def rule(self) -> Rule[Any]: ...

    @property
    def overlaps(self) -> bool:
        """Whether pulls travel behind the next step's computation: the setting, if the bound allows it.

        Not where the server steps: a worker would go on without its own update.
        """
        return self.overlap and self.slack > 0 and not self.server_steps

    @property
    @abstractmethod
    def slack(self) -> float:
        """By how many clocks a worker may always be ahead of the slowest."""

    def init(self, replica: Replica) -> PushPullState:
        # Zeros: between parameters are gaps, which travel, too, but which no gradient ever fills.
        base, update, kept = ([torch.zeros_like(weight) for weight in replica.weights] for _ in range(3))
        return PushPullState(0, base, update, kept if isinstance(self.codec, ErrorFeedback) else [])

    async def step(self, state: PushPullState, replica: Replica, port: Port) -> None:
        taken = await self._land(state, replica)
        rates = await (self._gradient if self.server_steps else self._update)(state, replica, taken)
        torch._foreach_mul_(state.update, 1 / port.world)
        state.clock += 1
        pushed = self._send(state, port, rates)
        pulled = port.pull(state.base, state.clock + 1 if self.overlaps else state.clock)
        state.flying = [pulled, pushed]
        if not self.overlaps:
            await self._land(state, replica)

    def _send(self, state: PushPullState, port: Port, report: Sequence[float]) -> Pending[bool]:
        """What was not sent before goes along. Where some is not finite, no shard is to take its part."""
        if state.kept:
            torch._foreach_add_(state.update, state.kept)
            if not is_finite(state.update):
                for part in state.update:
                    part.fill_(torch.nan)
        state.form = self.form(state)
        return port.push(state.update, state.clock, report, state.form)

    def form(self, state: PushPullState) -> int:
        """In which of its forms the next push travels."""
        return int(self.codec is not None)

    async def _update(self, state: PushPullState, replica: Replica, taken: bool) -> Sequence[float]:
        """What the worker's optimizer makes of its gradient."""
        if state.clock == 0:
            torch._foreach_copy_(state.base, replica.weights)
        await replica.update()
        if not taken:  # this gradient, too, came of weights that were not finite
            torch._foreach_copy_(replica.weights, state.base)
        for change, weight, base in zip(state.update, replica.weights, state.base, strict=True):
            torch.sub(weight, base, out=change)
        return ()

    async def _gradient(self, state: PushPullState, replica: Replica, taken: bool) -> Sequence[float]:
        """The gradient itself, unscaled and clipped; the worker's optimizer steps nothing."""
        fit = await replica.about_to_update()
        marks = gradient_marks(replica)
        if fit:
            copy_gradients(replica, state.update)
        else:  # the loop found it unfit; a push is owed all the same
            torch._foreach_zero_(state.update)
            marks = [0.0] * len(marks)
        rates = replica.optimizer.learning_rates
        await replica.update([])
        return [*rates, *marks]

    async def drain(self, state: PushPullState, replica: Replica, port: Port) -> None:
        for pending in state.flying:  # what has come is taken in where it would have been, looked at or not
            await pending

    async def publish(self, state: PushPullState, replica: Replica, port: Port) -> None:
        await port.pull(replica.weights, None)

    async def _land(self, state: PushPullState, replica: Replica) -> bool:
        """Take in what was pulled; whether what was pushed has been taken, too."""
        if not state.flying:
            return True
        pulled, pushed = state.flying
        await pulled
        taken: bool = await pushed
        state.flying = []
        if state.kept and taken and state.form:  # what did not travel is left in it
            state.update, state.kept = state.kept, state.update
        elif state.kept and taken:
            torch._foreach_zero_(state.kept)
        torch._foreach_copy_(replica.weights, state.base)
        return taken
