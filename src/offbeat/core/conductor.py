"""Conductor: leads one strategy through the moments of a worker's step, in either world.

    backward has ended               begin()             starts `Strategy.step`
    the optimizer is about to step   about_to_update()   resumes it from `replica.about_to_update()`
    the optimizer has stepped        update()            resumes it from `replica.update()`

A step awaits none, some or all of these moments, in this order. A step whose optimizer never ran (a
GradScaler found an overflow) is finished, all its moments `False`, before the next one begins, so that the
order of operations stays the same on every worker. A step to whose gradients another backward adds before the
optimizer runs is abandoned at its first moment, and begins anew when that backward has ended.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from offbeat.core.blocks import Block
from offbeat.core.ledger import Ledger
from offbeat.core.moments import Moment, StepMoment
from offbeat.core.no_grad import fast_no_grad
from offbeat.core.pending import Pending, expect_pending
from offbeat.core.port import Op, Port
from offbeat.core.published import PublishedModel
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.core.untrained import publish_untrained
from offbeat.errors import OffbeatError

S = TypeVar("S")

StrategyCode = Coroutine[Any, None, None]


@types.coroutine
def drive(
    code: StrategyCode, to_moment: bool = False, awaited: Pending[Any] | None = None
) -> Generator[Pending[Any], None, Moment | None]:
    """Run strategy code under no_grad to its end; with `to_moment`, to the next moment of the user's loop.

    Return that moment, or None at the end. Any other awaited object is yielded to the world, which resumes
    this generator once the result has arrived; the strategy code then reads the result itself. `awaited` is
    what the code awaits already.
    """
    if awaited is not None:
        yield awaited
    while (awaited := advance(code)) is not None:
        if to_moment and isinstance(awaited, Moment):
            return awaited
        yield awaited
    return None


def advance(code: StrategyCode) -> Pending[Any] | None:
    """Run strategy code under no_grad until it awaits something; return that, or None at its end."""
    if torch.is_grad_enabled():  # at each resume: the user's code runs in between
        with fast_no_grad():
            return advance(code)
    try:
        return expect_pending(code.send(None))
    except StopIteration:
        return None


class Conductor(Generic[S]):
    """One strategy, its state, and its step in progress."""

    def __init__(self, strategy: Strategy[S], replica: Replica, port: Port, ledger: Ledger) -> None:
        self.strategy = strategy
        self.replica = replica
        self.port = port
        self.ledger = ledger
        with torch.no_grad():
            self.state = strategy.init(replica)
        self._step: StrategyCode | None = None
        self._moment: Moment | None = None
        self.step_aborted = False
        self.saw_gradients = False  # the step in progress has passed the moment before the update

    def ready(self, block: Block) -> None:
        """Report to the strategy that a block's gradient is complete."""
        with fast_no_grad():
            self.strategy.ready(self.state, self.replica, block, self.port)

    async def begin(self) -> None:
        """Start a step, after backward has ended."""
        if self._moment is not None:
            await self.skip_update()
        self.step_aborted = False
        self.saw_gradients = False
        self.replica.inputs.count()
        self._step = self.strategy.step(self.state, self.replica, self.port)
        await self._resume()

    async def about_to_update(self) -> None:
        """Resume the step if it awaits the moment before the update. The optimizer is about to step."""
        if self._moment is not None and self._moment.when is StepMoment.BEFORE_UPDATE:
            self.replica.optimizer.check_unscaled()
            self.saw_gradients = True
            await self._fire(self._moment, True)
        if self._moment is not None and self._moment.before is not None:
            with fast_no_grad():
                self._moment.before()

    async def update(self, happened: bool = True) -> None:
        """Resume the step after the update; not `happened`: the optimizer was skipped and will not step."""
        if happened and self._moment is not None:
            if self._moment.when is StepMoment.BEFORE_UPDATE:
                raise OffbeatError(
                    f"{self.strategy.name} looks at the gradients just before the optimizer steps, but the "
                    "optimizer stepped inside backward(); call optimizer.step() after it"
                )
            await self._fire(self._moment, True)
        while not happened and self._moment is not None:
            await self._fire(self._moment, False)

    async def skip_update(self) -> None:
        """Finish a step that no optimizer followed, and whose gradients the loop has cleared."""
        if self._moment is not None and self._moment.hidden is not None:
            self._moment.hidden.clear()
        await self.update(happened=False)

    @property
    def is_open(self) -> bool:
        """True between the beginning of a step and its last moment."""
        return self._moment is not None

    @property
    def awaits_update(self) -> bool:
        """True if the step in progress awaits only that the optimizer has stepped."""
        return self._moment is not None and self._moment.when is StepMoment.AFTER_UPDATE

    @property
    def averages(self) -> bool:
        """True if the step in progress may replace the weights when it ends."""
        return self._moment is not None and self._moment.averages

    @property
    def hides_gradients(self) -> bool:
        """True while the step in progress hides gradients from the optimizers, to step them itself."""
        return self._moment is not None and self._moment.hidden is not None

    def abandon(self) -> None:
        """Drop the step in progress, which no optimizer has followed: its gradients are being added to."""
        assert self._step is not None
        if self._moment is not None and self._moment.hidden is not None:
            self._moment.hidden.show_for_accumulation()
        self._step.close()
        self._step = self._moment = None

    async def abort_step(self) -> None:
        """Finish a step without its update; if the optimizer still steps, `Session` raises an error."""
        if self._step is not None:
            await self.update(happened=False)
            self.step_aborted = True

    async def drain(self) -> None:
        """Finish the step and wait for everything in flight."""
        await self.update(happened=False)
        await drive(self.strategy.drain(self.state, self.replica, self.port))

    async def publish(self, port: Port, alone: bool = False, while_training: bool = False) -> PublishedModel:
        """Return the model to evaluate or save, the same on all workers, exchanged by `port`.

        Nothing in flight is waited for. `while_training`: training may go on before the result is there, so
        all that belongs to this moment is copied before the first exchange is awaited. With `alone`, only
        this worker reads the server's weights, and its buffers stay as they are.
        """
        buffers = self.replica.buffers
        with fast_no_grad():
            copied = None if alone else buffers.copy()
        published = PublishedModel([], [])

        async def exchange() -> None:
            sent = None
            if copied is not None:
                sent = buffers.send_copies(port, copied, await self.buffer_fraction(port))
            weights, own = await self._published_weights(port, alone), self.replica.weights
            if while_training:
                weights = [w.clone() if any(w is each for each in own) else w for w in weights]
            published.weights.extend(weights)
            if sent is not None:
                published.buffers.extend(await buffers.published(sent))
                published.untrained.extend(await publish_untrained(self.replica, port))

        await drive(exchange())
        return published

    async def buffer_fraction(self, port: Port) -> float | None:
        """Agree on this worker's weight in the mean of buffers; None: all weigh the same."""
        half = self.strategy.server_half()
        if half is None or half.in_step:
            return None
        return await self.replica.buffers.fraction(port, self.ledger)

    async def _published_weights(self, port: Port, alone: bool) -> list[Tensor]:
        """Return the weights that the strategy publishes; those of a server are read by worker 0 for all."""
        served = self.strategy.server_half() is not None and not alone
        if not served:
            return await self.strategy.publish(self.state, self.replica, port)
        if port.rank == 0:
            weights = await self.strategy.publish(self.state, self.replica, port)
        else:
            weights = [torch.empty_like(weight) for weight in self.replica.weights]
        return [await pending for pending in [port.broadcast(weight) for weight in weights]]

    async def barrier(self) -> None:
        """Wait until all workers have called this."""
        await self.port.all_reduce(torch.zeros(1, device=self.replica.weights[0].device), Op.MAX)

    async def _fire(self, moment: Moment, happened: bool) -> None:
        moment.fire(happened)
        if moment.when is StepMoment.AFTER_UPDATE:
            self.replica.inputs.skipped_updates += not happened
        self._moment = None
        await self._resume()

    async def _resume(self) -> None:
        """Run the step until it ends or awaits a moment of the user's loop."""
        assert self._step is not None
        awaited = advance(self._step)
        if awaited is not None and not isinstance(awaited, Moment):  # often there is nothing to wait for
            awaited = await drive(self._step, to_moment=True, awaited=awaited)
        self._moment = awaited
        if self._moment is None:
            self._step = None
            self.ledger.step()
