"""Sessions of a worker that is several ranks: with a sharded model, or with gradients averaged inside.

Both reduce over the members of a replica what a single rank does not know (core/members.py). A published
model has the same buffers on all ranks: in training, each rank averages its buffers with the same rank of
other replicas only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from offbeat.core.blocks import Block
from offbeat.core.conductor import drive
from offbeat.core.gradients import GradientBuckets
from offbeat.core.ledger import Ledger
from offbeat.core.members import Members
from offbeat.core.no_grad import fast_no_grad
from offbeat.core.pending import Pending
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.worlds.processes.port import ProcessPort


class MemberSession(Session[Any]):
    """A session of one of several ranks that train a replica together."""

    def __init__(
        self, strategy: Strategy[Any], replica: Replica, port: ProcessPort, ledger: Ledger, sharded: bool
    ) -> None:
        assert port.members is not None
        self._members_port = port.members
        device = replica.weights[0].device
        replica.members = Members(port.members, sharded, device, port.global_rank)
        super().__init__(strategy, replica, port, ledger)

    async def publish(self, alone: bool = False) -> Callable[[], None]:
        restore = await super().publish(alone)
        if not alone:
            await drive(self.replica.buffers.sync_all(self._members_port))
        return restore

    async def share_published(self, reader: int) -> None:
        await super().share_published(reader)
        await drive(self.replica.buffers.sync_all(self._members_port))

    async def _is_added_to(self, first: nn.Parameter) -> bool:
        # A rank whose own parts are empty or zero cannot tell: the members must decide alike.
        (adds,) = await self.replica.members.agree_on(float(await super()._is_added_to(first)))
        return bool(adds)

    async def after_closure(self, optimizer: Optimizer, loss: Any) -> Any:
        if isinstance(optimizer, LBFGS) and isinstance(loss, Tensor):  # it must decide alike on all members
            loss = await self._members_port.all_reduce(loss.detach().clone())
        return await super().after_closure(optimizer, loss)


class AveragingSession(MemberSession):
    """A session whose gradients are averaged over the members before the strategy sees them.

    A block is averaged as soon as backward has completed it, while backward goes on. Then it is reported to
    the strategy, in the order of the blocks, as if this rank had computed it alone from all members' data.
    """

    def __init__(self, strategy: Strategy[Any], replica: Replica, port: ProcessPort, ledger: Ledger) -> None:
        super().__init__(strategy, replica, port, ledger, sharded=False)
        self._gatherer = self._buckets or GradientBuckets(replica)
        self._buckets = self._gatherer
        self._in_flight: deque[tuple[Block, Pending[Tensor]]] = deque()

    async def broadcast(self, root: int = 0) -> None:
        """Give every rank of every replica the state of the first rank of replica `root`."""
        await drive(self.replica.broadcast(self._members_port))
        await super().broadcast(root)

    def gradient_ready(self, param: nn.Parameter) -> None:
        for block in self._gatherer.on_gradient(param):
            self._average(block)
        while self._in_flight and self._in_flight[0][1].done():
            block, pending = self._in_flight.popleft()
            pending.result()
            self._report(block)

    def complete_gradients(self) -> list[Block]:
        for block in super().complete_gradients():
            self._average(block)
        return []

    async def begin_step(self) -> None:
        while self._in_flight:
            block, pending = self._in_flight.popleft()
            await pending
            self._report(block)
        await super().begin_step()

    def _average(self, block: Block) -> None:
        with fast_no_grad():
            self._in_flight.append((block, self._members_port.all_reduce(block.marked)))

    def _report(self, block: Block) -> None:
        with fast_no_grad():
            block.hand_out()
            block.absent = [param for param in block.params if param.grad is None]
            block.mark()
        if self._reports_blocks:
            self.conductor.ready(block)
