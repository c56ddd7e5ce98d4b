"""Conductor: leads one strategy through the moments of a worker's step, in either world.

    backward has ended               begin()             starts `Strategy.step`
    the optimizer is about to step   about_to_update()   lets it go on from `replica.about_to_update()`
    the optimizer has stepped        update()            lets it go on from `replica.update()`

A step awaits none, some or all of these moments, in this order. A step whose optimizer never ran (a
GradScaler found an overflow) is finished, all its moments `False`, before the next one begins: so the order
of operations stays the same on every worker.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

import torch

from offbeat.core.blocks import Block
from offbeat.core.ledger import Ledger
from offbeat.core.no_grad import fast_no_grad
from offbeat.core.pending import Pending, expect_pending
from offbeat.core.port import Moment, Op, Port, StepMoment
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError

S = TypeVar("S")

Play = Coroutine[Any, None, None]


def advance(play: Play) -> Pending[Any] | None:
    """Let strategy code run until it awaits something (which is returned) or ends."""
    if torch.is_grad_enabled():  # at each resume: the user's code runs in between
        with fast_no_grad():
            return advance(play)
    try:
        return expect_pending(play.send(None))
    except StopIteration:
        return None


@types.coroutine
def reach(pending: Pending[Any]) -> Generator[Pending[Any], None, None]:
    """Suspend until `pending` is done, but leave its result to the one who awaited it."""
    yield pending


async def perform(play: Play) -> None:
    """Run strategy code to its end."""
    while (awaited := advance(play)) is not None:
        await reach(awaited)


class Conductor(Generic[S]):
    """One strategy, its state, and where in its step it stands."""

    def __init__(self, strategy: Strategy[S], replica: Replica, port: Port, ledger: Ledger) -> None:
        self.strategy = strategy
        self.replica = replica
        self.port = port
        self.ledger = ledger
        with torch.no_grad():
            self.state = strategy.init(replica)
        self._step: Play | None = None
        self._moment: Moment | None = None
        self.cut_short = False

    @property
    def suspended(self) -> bool:
        """Whether a step has begun and not ended: the optimizer is still to come."""
        return self._step is not None

    def ready(self, block: Block) -> None:
        with fast_no_grad():
            self.strategy.ready(self.state, self.replica, block, self.port)

    async def begin(self) -> None:
        """Backward has ended."""
        if self._moment is not None:
            await self.update(happened=False)
        self.cut_short = False
        self.replica.count_samples()
        self._step = self.strategy.step(self.state, self.replica, self.port)
        await self._play()

    async def about_to_update(self) -> None:
        """The optimizer is about to step."""
        if self._moment is not None and self._moment.when is StepMoment.BEFORE_UPDATE:
            self.replica.check_unscaled()
            await self._fire(self._moment, True)

    async def update(self, happened: bool = True) -> None:
        """The optimizer has stepped, or never will in this step."""
        if happened and self._moment is not None:
            if self._moment.when is StepMoment.BEFORE_UPDATE:
                raise OffbeatError(
                    f"{self.strategy.name} looks at the gradients just before the optimizer steps, but "
                    "backward() ran inside of optimizer.step(closure); call it before optimizer.step()"
                )
            await self._fire(self._moment, True)
        while not happened and self._moment is not None:
            await self._fire(self._moment, False)

    async def _fire(self, moment: Moment, happened: bool) -> None:
        moment.fire(happened)
        self._moment = None
        await self._play()

    async def abort_step(self) -> None:
        """Finish a step whose optimizer, it seems, was skipped; should it come after all, it is an error."""
        if self.suspended:
            await self.update(happened=False)
            self.cut_short = True

    async def drain(self) -> None:
        """Afterwards nothing is in flight."""
        await self.update(happened=False)
        await perform(self.strategy.drain(self.state, self.replica, self.port))

    async def publish(self, alone: bool = False) -> Callable[[], None]:
        """Drain, and give every worker the same weights and statistics; returns what undoes the latter.

        Alone: only this worker asks, of a server, and looks at its own statistics.
        """
        await self.drain()
        own = self.replica.buffers.all()
        if not self.strategy.identical_replicas:
            own += self.replica.weights
        before = [tensor.clone() for tensor in own]
        meet = self.strategy.server_half() is not None and not alone
        if meet:  # all pushes have come
            await self.barrier()
        await perform(self.strategy.publish(self.state, self.replica, self.port))
        if meet:  # and nobody pushes again before all have read
            await self.barrier()
        if not alone:
            await perform(self.replica.buffers.sync_all(self.port))

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in zip(own, before, strict=True):
                    tensor.copy_(value)

        return restore

    async def barrier(self) -> None:
        """Wait until all workers are here."""
        await self.port.all_reduce(torch.zeros(1, device=self.replica.weights[0].device), Op.MAX)

    async def _play(self) -> None:
        """Go on with the step until it ends or comes to a moment of the user's loop."""
        assert self._step is not None
        while (awaited := advance(self._step)) is not None:
            if isinstance(awaited, Moment):
                self._moment = awaited
                return
            await reach(awaited)
        self._step = None
        self.ledger.planned_steps = self.strategy.planned(self.state)
        self.ledger.step()
