"""Session: one strategy attached to one model. Both worlds drive it, each by its own clock.

Over processes, hooks of autograd and of the optimizer call a session and block; in virtual time, a coroutine
calls it and sleeps between the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core import checkpoint
from offbeat.core.blocks import Block
from offbeat.core.conductor import Conductor, drive
from offbeat.core.gradients import GradientBuckets
from offbeat.core.ledger import Ledger
from offbeat.core.port import Op, Port, ServerAdmin
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_frozen
from offbeat.errors import OffbeatError

S = TypeVar("S")


class Session(Generic[S]):
    """A strategy with its replica, gradient buckets and conductor. A world drives the session."""

    ends_after_others = False  # the end of a backward is after all callbacks that others have queued for it

    def __init__(self, strategy: Strategy[S], replica: Replica, port: Port, ledger: Ledger) -> None:
        self.strategy = strategy
        self.replica = replica
        self.port = port
        self.ledger = ledger
        self.conductor = Conductor(strategy, replica, port, ledger)
        gathers = strategy.layout(replica.model).gradients
        self._buckets = GradientBuckets(replica) if gathers else None
        self._frozen = [(n, p) for n, p in replica.model.named_parameters() if not p.requires_grad]

    @property
    def model(self) -> nn.Module:
        """The model, as the loop has it."""
        return self.replica.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, as the loop has it."""
        return self.replica.optimizer.wrapped

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are to be reported by `gradient_ready`, as the loop has them."""
        return [param for block in self.replica.blocks for param in block.params]

    # --- one step, in this order

    def add_samples(self, count: int) -> None:
        """Count the samples of the coming backward, for strategies that weight by them."""
        self.replica.inputs.upcoming += count
        self.ledger.count_samples(count)

    def backward_begins(self) -> None:
        """Check the layout and prepare for gradients."""
        self.replica.check_layout()
        if self._buckets is not None:
            self._buckets.on_backward_start()

    def gradient_ready(self, param: nn.Parameter) -> None:
        """Gather a parameter's gradient; report the blocks that it completes to the strategy."""
        if self._buckets is not None:
            for block in self._buckets.on_gradient(param):
                self.conductor.ready(block)

    def complete_gradients(self) -> list[Block]:
        """Gather the gradients that `gradient_ready` was not called for; return the blocks still to report.

        The caller reports each by `block_ready`, in order.
        """
        check_frozen(self._frozen)
        return [] if self._buckets is None else self._buckets.on_backward_end()

    def block_ready(self, block: Block) -> None:
        """Report to the strategy that a block's gradient is complete."""
        self.conductor.ready(block)

    async def begin_step(self) -> None:
        """Start the strategy's step. Backward has ended, and all blocks were reported."""
        await self.conductor.begin()

    async def before_update(self) -> None:
        """Resume the step just before the optimizer steps."""
        if self.conductor.step_aborted:
            raise OffbeatError(
                "state_dict() was called between backward() and optimizer.step(), so that state lacks this "
                "step; save after optimizer.step()"
            )
        await self.conductor.about_to_update()

    async def after_update(self) -> None:
        """Resume the step after the optimizer has stepped."""
        await self.conductor.update()

    # --- between steps

    async def broadcast(self) -> None:
        """Give every worker the whole state of worker 0."""
        await drive(self.replica.broadcast(self.port))

    async def drain(self) -> None:
        """Finish the step and wait for everything in flight."""
        await self.conductor.drain()

    async def publish(self, alone: bool = False) -> Callable[[], None]:
        """Give every worker the same model, to evaluate or save; return a function that restores its own.

        With `alone`, only this worker reads the server's weights.
        """
        return await self.conductor.publish(alone)

    async def rejoin(self) -> None:
        """Start over from the server's weights, as a restarted process does."""
        conductor = self.conductor
        conductor.state = self.strategy.init(self.replica)
        self.replica.optimizer.wrapped.state.clear()
        await self.port.server.pull(self.replica.weights, None)

    async def save(self, server: ServerAdmin | None = None) -> dict[str, Any]:
        """Return a checkpoint of this worker."""
        return await checkpoint.save(self.conductor, server)

    def load(self, saved: dict[str, Any]) -> list[Tensor]:
        """Restore a checkpoint; return the tensors to load into a server, if any."""
        return checkpoint.load(self.conductor, saved)

    def release(self) -> None:
        """Give every parameter its own memory again."""
        with torch.no_grad():
            self.replica.release()


async def wait_for_all(port: Port, device: torch.device) -> None:
    """Wait until all workers have called this."""
    await port.all_reduce(torch.zeros(1, dtype=torch.float64, device=device), Op.MAX)


async def arrival_lag(
    port: Port, device: torch.device, clock: Callable[[], float], arrived_s: float
) -> float:
    """Wait until all workers have called this; return by how many seconds this one came after the first."""
    await wait_for_all(port, device)
    waited_s = clock() - arrived_s
    longest_s = await port.all_reduce(torch.tensor([waited_s], dtype=torch.float64, device=device), Op.MAX)
    return longest_s.item() - waited_s
