"""Session: one strategy attached to one model. Both worlds drive it, each by its own clock.

Over processes, hooks of autograd and of the optimizer call a session and block; in virtual time, a coroutine
calls it and sleeps between the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from offbeat.core import checkpoint
from offbeat.core.accumulation import AccumulationDetector
from offbeat.core.blocks import Block, Layout
from offbeat.core.checksum import check_identical
from offbeat.core.conductor import Conductor, drive
from offbeat.core.gradients import GradientBuckets
from offbeat.core.ledger import Ledger
from offbeat.core.optimizer_steps import OptimizerSteps, has_gradients
from offbeat.core.overrides import promises
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
        layout = strategy.layout(replica.model)
        self._reports_blocks = layout.gradients  # the strategy sends them in backward
        gathers = layout.gradients and not _nothing_travels(strategy, layout, port)
        self._buckets = GradientBuckets(replica) if gathers else None
        self._frozen = [(n, p) for n, p in replica.model.named_parameters() if not p.requires_grad]
        self._gradients = AccumulationDetector([p for block in replica.blocks for p in block.params])
        self._steps = OptimizerSteps(replica.optimizer.optimizers)
        self._updating: Optimizer | None = None  # is inside its step()
        self._in_backward: list[Optimizer] = []  # have stepped inside the backward in progress
        self._settled = False  # the step in progress was finished early, before its optimizers step
        self._ends_after_backward = False  # the previous step, once the backward in progress has ended
        self._continues = False  # the step in progress was dropped, and begins anew with more gradients
        self._weights_changed = False  # the step in progress has changed the weights before the update

    @property
    def clock(self) -> int:
        """Steps of this training so far."""
        return self.ledger.steps

    @property
    def model(self) -> nn.Module:
        """The model, as the loop has it."""
        return self.replica.model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers, as the loop has them."""
        return self.replica.optimizer.optimizers

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are to be reported by `gradient_ready`, as the loop has them."""
        return [param for block in self.replica.blocks for param in block.params]

    # --- one step, in this order

    def add_samples(self, count: int) -> None:
        """Count the samples of the coming backward, for strategies that weight by them."""
        self.replica.inputs.upcoming += count
        self.ledger.count_samples(count)

    async def backward_begins(self, first: nn.Parameter, synchronize: bool = True) -> None:
        """Find out whether a new step begins, and prepare for gradients. `first` has its gradient already.

        A backward that does not `synchronize` only accumulates gradients.
        """
        if self.conductor.is_open and not self._ends_after_backward:
            await self._look_at_previous_step(first)
        self._settled = False
        self._in_backward = []
        if synchronize:
            self.replica.keep_layout()
            if self._buckets is not None:
                await self._enter_step()
                self._buckets.on_backward_start()

    async def step_begins(self) -> None:
        """Prepare for a step of which nothing has been exchanged, and no gradient accumulated yet."""

    async def _enter_step(self) -> None:
        if not self._continues:
            await self.step_begins()

    async def _look_at_previous_step(self, first: nn.Parameter) -> None:
        """End the step in progress, or drop it where this backward belongs to it as well."""
        adds = not self._steps.any_stepped and await self._is_added_to(first)
        if adds and not self.conductor.saw_gradients:
            self.conductor.abandon()
            self._continues = True
        elif self._updating is not None:
            self._evaluate_again(self._updating)
        elif self._reports_blocks and self.conductor.awaits_update and not self.conductor.averages:
            await self._end_previous_step()  # changes no weights, and must come before the next blocks
        else:  # it may replace the weights, which this backward still reads
            self._ends_after_backward = True

    async def _is_added_to(self, first: nn.Parameter) -> bool:
        """Return whether the backward that has just reached `first` adds to the last one's gradients."""
        return self._gradients.is_added_to(first)

    async def _end_previous_step(self) -> None:
        """End a step that some optimizer has followed, but not all; or none, where a GradScaler skipped."""
        self._ends_after_backward = self._continues = False
        if self._steps.any_stepped:
            await self._end_step()
        else:
            await self.conductor.skip_update()

    def _evaluate_again(self, optimizer: Optimizer) -> None:
        """Drop the step in progress: the optimizer calls its closure once more, at other weights."""
        conductor = self.conductor
        if conductor.saw_gradients or conductor.hides_gradients or self._weights_changed:
            raise OffbeatError(
                f"{type(optimizer).__name__} calls its closure more than once per step, but "
                f"{self.strategy.name} acts after the first call; BSP, LocalSGD and DiLoCo allow more"
            )
        conductor.abandon()
        self._continues = True

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

    async def accumulate(self) -> None:
        """Finish a backward that does not synchronize, but only accumulates gradients."""
        await self._finish_backward()

    async def _finish_backward(self) -> None:
        if self._ends_after_backward:
            await self._end_previous_step()
        if self._in_backward:
            await self._end_backward_with_steps()

    async def begin_step(self) -> None:
        """Start the strategy's step. Backward has ended, and all blocks were reported."""
        if self._in_backward or self._ends_after_backward:
            began_in_backward = bool(self._in_backward)
            await self._finish_backward()
            if began_in_backward:
                return
        if self._buckets is None and not self._continues:
            await self.step_begins()
        self._steps.begin()
        self._steps.expect()
        await self._begin()
        self._steps.expect()  # a parameter may have a gradient on other workers only

    def remember_gradients(self) -> None:
        """Remember the gradients that the loop sees now, to find out whether the next backward adds to them.

        A world whose backwards never add to others need not call this, nor `backward_begins`.
        """
        self._gradients.remember()

    async def _begin(self) -> None:
        weights = self.replica.weights
        versions = [flat._version for flat in weights]  # no step of an optimizer changes them
        await self.conductor.begin()
        self._weights_changed = versions != [flat._version for flat in weights]

    async def steps_in_backward(self, optimizer: Optimizer) -> None:
        """Record that an optimizer is about to step inside backward, as soon as its gradients are there.

        The first one begins the step, while the weights are still as the last step left them.
        """
        if self._reports_blocks or self._buckets is not None or self._ends_after_backward:
            raise self._refuse_steps_in_backward(optimizer)
        if not self._in_backward:
            await self._begin()
            conductor = self.conductor
            acts_before = conductor.is_open and (conductor.hides_gradients or not conductor.awaits_update)
            if acts_before or self._weights_changed:
                raise self._refuse_steps_in_backward(optimizer)
        self._in_backward.append(optimizer)

    async def _end_backward_with_steps(self) -> None:
        self._steps.begin(self._in_backward)
        self._steps.expect()
        self._in_backward = []
        self._gradients.remember()
        if self._steps.all_stepped:
            await self._end_step()

    def _refuse_steps_in_backward(self, optimizer: Optimizer) -> OffbeatError:
        return OffbeatError(
            f"{type(optimizer).__name__} steps inside backward(), but {self.strategy.name} acts between "
            "backward() and optimizer.step(): step after backward(), or use LocalSGD or DiLoCo"
        )

    async def before_update(self, optimizer: Optimizer) -> None:
        """Resume the step just before an optimizer steps."""
        if self.conductor.step_aborted:
            raise OffbeatError(
                "state_dict() was called between backward() and optimizer.step(), so that state lacks this "
                "step; save after optimizer.step()"
            )
        self.replica.keep_layout()
        if not self.conductor.is_open and not self._settled and has_gradients(optimizer):
            await self._begin_late()
        if self._steps.is_first:
            if self._buckets is not None and self.conductor.is_open:
                self._buckets.check_complete()
            self._steps.expect()
            await self.conductor.about_to_update()
            self._steps.is_first = False
        if self.conductor.saw_gradients and len(self.replica.optimizer.optimizers) > 1:
            self._steps.check_unchanged(optimizer)
        self.replica.optimizer.watch.on_step_start(optimizer)

    async def _begin_late(self) -> None:
        """Begin a step of which no backward told: all were inside `no_sync`, or gradients were assigned."""
        if self._buckets is not None:
            await self._enter_step()
        for block in self.complete_gradients():
            self.block_ready(block)
        await self.begin_step()

    async def after_update(self, optimizer: Optimizer) -> None:
        """Resume the step after an optimizer has stepped; the last one ends the step."""
        self.replica.keep_layout()
        self.replica.optimizer.watch.on_step_end(optimizer)
        self._updating = None
        if self.conductor.is_open:
            self._steps.record(optimizer)
            if self._steps.all_stepped:
                await self._end_step()

    @property
    def is_partly_stepped(self) -> bool:
        """True while some optimizers have followed the step in progress, and others have not."""
        return self.conductor.is_open and self._steps.any_stepped

    async def forward_begins(self) -> None:
        """End a step that some optimizers have followed: the others do not take part in it."""
        if self.is_partly_stepped:
            await self._end_step()

    def calls_closure(self, optimizer: Optimizer) -> None:
        """Expect backwards inside the optimizer's step, which calls a closure."""
        self._updating = optimizer

    async def after_closure(self, optimizer: Optimizer, loss: Any) -> Any:
        """Resume the step after a closure's backward; return the loss that the optimizer may look at.

        Where LBFGS looks at losses to decide how often it calls the closure, all workers must decide alike.
        """
        await self.before_update(optimizer)
        if isinstance(optimizer, LBFGS) and self.strategy.identical_replicas and isinstance(loss, Tensor):
            return await self.port.all_reduce(loss.detach().clone())
        return loss

    async def _end_step(self) -> None:
        """Resume the step after all optimizers that the loop steps have stepped."""
        if not self._steps.all_stepped and self.conductor.hides_gradients:
            raise OffbeatError(
                f"not all attached optimizers have stepped, though their parameters have gradients; "
                f"{self.strategy.name} steps some parameters itself, so it needs all of them after each "
                "backward(). BSP, LocalSGD, SelSync and DiLoCo let optimizers step in turn"
            )
        self._continues = False
        await self.conductor.update()

    # --- between steps

    async def broadcast(self, root: int = 0) -> None:
        """Give every worker the whole state of worker `root`."""
        await drive(self.replica.broadcast(self.port, root))

    async def share_published(self, reader: int) -> None:
        """Give every worker the weights that worker `reader` has read, and buffers as `consensus()` does."""

        async def share() -> None:
            fraction = await self.conductor.buffer_fraction(self.port)
            await self.replica.buffers.sync_all(self.port, fraction)

        await drive(share())
        await self.broadcast(reader)

    async def check_identical(self) -> None:
        """Raise an error if workers hold different models, though they have just published one."""
        await drive(check_identical(self.replica, self.port))

    async def drain(self) -> None:
        """Finish the step and wait for everything in flight."""
        await self.finish_step()
        await self.conductor.drain()

    async def finish_step(self) -> None:
        """End a step that some optimizer has followed; any other is finished early, without an update."""
        self.replica.keep_layout()
        if self.conductor.is_open and self._steps.any_stepped:
            await self._end_step()
        self._settled |= self.conductor.is_open
        await self.conductor.update(happened=False)

    async def publish(self, alone: bool = False) -> Callable[[], None]:
        """Give every worker the same model, to evaluate or save; return a function that restores its own.

        What is in flight stays in flight. With `alone`, only this worker reads the server's weights.
        """
        await self.finish_step()
        return (await self.conductor.publish(self.port, alone)).show(self.replica)

    async def rejoin(self) -> None:
        """Start over from the server's weights, as a restarted process does."""
        conductor = self.conductor
        conductor.state = self.strategy.init(self.replica)
        self.replica.optimizer.clear_state()
        await self.port.server.pull(self.replica.weights, None)

    async def save(self, server: ServerAdmin | None = None) -> dict[str, Any]:
        """Return a checkpoint of this worker."""
        self.replica.keep_layout()
        if self._steps.any_stepped and self.conductor.is_open:
            await self._end_step()
        return await checkpoint.save(self.conductor, server)

    def load(self, saved: dict[str, Any]) -> list[Tensor]:
        """Restore a checkpoint; return the tensors to load into a server, if any."""
        return checkpoint.load(self.conductor, saved)

    def release(self) -> None:
        """Give every parameter its own memory again."""
        with torch.no_grad():
            self.replica.release()


def _nothing_travels(strategy: Strategy[Any], layout: Layout, port: Port) -> bool:
    """Return whether the strategy would gather gradients for the exchange with others alone, and has none."""
    promised = not layout.gathers_alone and promises(type(strategy), "layout", "ready", "step")
    return promised and port.world == 1 and not port.elastic


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
