"""Push and pull at every step: the worker's half of ASP, SSP, DSSP and GSSP.

    w ← the optimizer's own step;   push (w − base)/N;   pull the weights, once the server's rule admits that
    base ← w ← the pulled weights

The update that the worker's own optimizer made is pushed, scaled by 1/N, so any optimizer works. The pull
follows the push on the same connection, so a read always holds the reader's own updates.

With `push="gradient"` the server has the optimizer, and steps at every push, with g at a learning rate of η/N
(SSP with staleness 0 steps once for all workers instead, at η). What that comes to if nobody is stale:

    SGD        both ways the step of the mean gradient
    momentum   "update": the same. "gradient": momentum decays N times as fast
    Adam etc.  "update": the mean of N normalised steps, which is shorter than the step of the mean gradient
               where gradients differ. "gradient": N steps of an N-th of the length, by moments of all pushes

`push="auto"` [ours] pushes gradients if all optimizers are adaptive ones (Adam etc.) that a server can run,
else updates (docs/strategies/ssp.md has the figures).

With a codec, the update is sent as packets, one for each shard, which decodes them before it applies them;
with error feedback, the residual is added to the next update. Weights are pulled uncompressed.

Where the rule's bound allows it, the pull overlaps the next forward and backward: these see the worker's own
weights, with its own update in them; the pulled weights replace them when backward has ended. Such a pull
carries the clock at which it will be used, so the bound holds for that clock.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.codecs import Codec, CodecField, ErrorFeedback
from offbeat.core.blocks import Layout
from offbeat.core.fields import Choice, Flag
from offbeat.core.finite import is_finite
from offbeat.core.gradients import copy_gradients, gradient_marks
from offbeat.core.pending import Pending
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.server.half import ServerHalf, is_linear
from offbeat.server.optimizer_spec import runs_at_server
from offbeat.server.rule import Rule

AUTO = "auto"
PUSHES = (AUTO, "update", "gradient")


@dataclass
class PushPullState:
    """A worker's clock, the weights that it pulled last, and the operations in progress."""

    clock: int  # how often this worker has pushed
    base: list[Tensor]
    update: list[Tensor]
    error: list[Tensor] = field(default_factory=list)  # with error feedback: the residual of earlier pushes
    codec_index: int = 0  # of the last push
    hint: int = 0  # the rule's, of the latest pull
    in_flight: list[Pending[Any]] = field(default_factory=list)  # a pull into `base`, and a push of `update`
    accepted: bool = True  # whether the server accepted the latest push
    has_base: bool = field(default=False, metadata={"saved": False})  # or the first step has not begun


@dataclass(frozen=True, kw_only=True)
class PushPull(Strategy[PushPullState]):
    """Base of strategies that push an update after every step, and pull."""

    codec: Annotated[
        Codec | None,
        CodecField(
            splittable="each shard of a server holds a slice of the weights, and decodes pushes one by one"
        ),
    ] = None
    push: Annotated[
        str,
        Choice(
            "whether the update of the worker's optimizer is pushed, or the gradient; auto: by the optimizer",
            of=PUSHES,
        ),
    ] = AUTO
    overlap: Annotated[bool, Flag("overlap pulls with the next step, where the bound allows it")] = True

    def for_optimizers(self, optimizers: Sequence[Optimizer]) -> Self:
        if self.push != AUTO:
            return self
        gradient = all(runs_at_server(each) and not is_linear(each) for each in optimizers)
        return replace(self, push="gradient" if gradient else "update")

    def server_half(self) -> ServerHalf:
        return ServerHalf(
            rule=self.rule(),
            push_codecs=self._push_codecs(),
            in_step=False,
            owns_optimizer=self._pushes_gradients,
        )

    @abstractmethod
    def rule(self) -> Rule[Any]:
        """Return the server's rule of admission."""

    @property
    @abstractmethod
    def slack(self) -> float:
        """The number of clocks that a worker may always be ahead of the slowest."""

    @property
    def overlaps(self) -> bool:
        """True if pulls overlap the next step's computation: the setting, if the bound allows it.

        False where the server owns the optimizer: a worker would continue without its own update.
        """
        return self.overlap and self.slack > 0 and not self._pushes_gradients

    def layout(self, model: nn.Module) -> Layout:
        keeps = not self.overlaps and not self._pushes_gradients
        return Layout.default(model, keeps_loaded=False, keeps_edits=keeps)

    @property
    def _pushes_gradients(self) -> bool:
        return self.push == "gradient"

    def _push_codecs(self) -> tuple[Codec, ...]:
        if self.codec is None:
            return ()
        return (self.codec.codec if isinstance(self.codec, ErrorFeedback) else self.codec,)

    def init(self, replica: Replica) -> PushPullState:
        # Zeros, since the gaps between parameters are sent too, and no gradient ever fills them.
        def zeros() -> list[Tensor]:
            return [torch.zeros_like(weight) for weight in replica.weights]

        return PushPullState(0, zeros(), zeros(), zeros() if isinstance(self.codec, ErrorFeedback) else [])

    async def step(self, state: PushPullState, replica: Replica, port: Port) -> None:
        await self._receive(state, replica)
        if self._pushes_gradients:
            report = await self._gradient(state, replica, self.fraction(port))
        else:
            report = []
            await self._update(state, replica)
            torch._foreach_mul_(state.update, self.fraction(port))
        state.clock += 1
        if replica.members.count > 1:  # if one member's part is refused, all members' must be
            (bad,) = await replica.members.agree_on(float(not is_finite(state.update)))
            if bad:
                _spoil(state.update)
        pushed = self._send(state, port, report)
        pulled = port.server.pull(state.base, state.clock + 1 if self.overlaps else state.clock)
        state.in_flight = [pulled, pushed]
        if not self.overlaps:
            await self._receive(state, replica)

    def _send(self, state: PushPullState, port: Port, report: Sequence[float]) -> Pending[bool]:
        """Push the update; with error feedback, add the residual of earlier pushes first."""
        if state.error:
            torch._foreach_add_(state.update, state.error)
            if not is_finite(state.update):  # then every shard must refuse its slice
                _spoil(state.update)
        state.codec_index = self.codec_index(state)
        return port.server.push(state.update, state.clock, report=report, codec=state.codec_index)

    def fraction(self, port: Port) -> float:
        """Return the factor of a push, or of its learning rates: 1/N, since the server adds up N workers'."""
        return 1 / port.world

    def codec_index(self, state: PushPullState) -> int:
        """Return which of the push codecs compresses the next push."""
        return int(self.codec is not None)

    async def _update(self, state: PushPullState, replica: Replica) -> None:
        """Step the worker's optimizer, and make the change of its weights the update."""
        if state.clock == 0 and not state.has_base:  # an optimizer may move the weights, and begin again
            torch._foreach_copy_(state.base, replica.weights)
            state.has_base = True
        await replica.update()
        if not state.accepted:  # this gradient, too, was computed from weights that were not finite
            torch._foreach_copy_(replica.weights, state.base)
        for change, weight, base in zip(state.update, replica.weights, state.base, strict=True):
            torch.sub(weight, base, out=change)

    async def _gradient(self, state: PushPullState, replica: Replica, fraction: float) -> Sequence[float]:
        """Make the gradient, unscaled and clipped, the update; the worker's optimizer steps nothing.

        Return what the server's optimizer needs. A fraction of the learning rate is a fraction of the step,
        and of the weight decay, under any optimizer; a fraction of the gradient is not under Adam.
        """
        usable = await replica.about_to_update()
        replica.optimizer.check_settings(self.name)
        replica.optimizer.check_held_state(self.name)
        marks = gradient_marks(replica)
        if usable:
            copy_gradients(replica, state.update)
        else:  # the loop skips this step, but a push is still due
            torch._foreach_zero_(state.update)
            marks = [0.0] * len(marks)
        rates = [fraction * rate for rate in replica.optimizer.learning_rates]
        await replica.update([])
        replica.optimizer.hold_state()
        return [*rates, *marks]

    async def drain(self, state: PushPullState, replica: Replica, port: Port) -> None:
        for pending in state.in_flight:  # the next step uses the results, even if an evaluation comes first
            await pending

    async def publish(self, state: PushPullState, replica: Replica, port: Port) -> list[Tensor]:
        weights = [torch.empty_like(weight) for weight in replica.weights]
        await port.server.read(weights)
        return weights

    async def _receive(self, state: PushPullState, replica: Replica) -> None:
        """Replace the weights by the pulled ones; note whether the server accepted the push."""
        if not state.in_flight:
            return
        pulled, pushed = state.in_flight
        _, state.hint = await pulled  # a plain list, if a checkpoint was saved with the pull in flight
        state.accepted = await pushed
        if replica.members.count > 1:  # its members' servers decide one by one
            refused, hint = await replica.members.agree_on(float(not state.accepted), state.hint)
            state.accepted, state.hint = not refused, int(hint)
        state.in_flight = []
        if state.error and state.accepted and state.codec_index:  # the update contains the residual
            state.update, state.error = state.error, state.update
        elif state.error and state.accepted:
            torch._foreach_zero_(state.error)
        torch._foreach_copy_(replica.weights, state.base)


def _spoil(update: list[Tensor]) -> None:
    for part in update:
        part.fill_(torch.nan)
