"""attach: connect a strategy to a user's own training loop in one line.

    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8)) as sync:
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()    # the strategy's step begins when this ends
            optimizer.step()                 # and ends when this ends

Hooks of autograd and of the optimizer drive the strategy; the loop stays as it is. A step is a step of the
optimizer: several backwards before it accumulate gradients, and of several optimizers the last one ends it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.backward import EndOfBackward, inside_backward
from offbeat.core.forward import NextForward
from offbeat.core.hook_order import LastHooks
from offbeat.core.ledger import WorkerTotals
from offbeat.core.optimizer_steps import has_gradients, with_gradients
from offbeat.core.ownership import Ownership
from offbeat.core.pending import block_on
from offbeat.core.strategy import Strategy
from offbeat.core.units import parse_rate
from offbeat.core.validation import check_attachable, check_unwrapped, unwrap
from offbeat.core.weight_watch import WeightWatch
from offbeat.errors import OffbeatError, SettingError
from offbeat.server.half import for_optimizers, log_caution
from offbeat.worlds.processes.closing import disconnect, publish_for_good
from offbeat.worlds.processes.connection import Connected, Options, connect_workers
from offbeat.worlds.processes.groups import Groups
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import destroy_group
from offbeat.worlds.processes.replicas import connect_replicas
from offbeat.worlds.processes.same_batches import SameBatches
from offbeat.worlds.processes.server.bootstrap import SERVER

_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    strategy: Strategy[Any],
    *,
    buffers: str = "average",
    timeout_s: float = 300.0,
    bandwidth: str | None = None,
    server: str | None = None,
    steps_per_epoch: int | None = None,
    insecure: bool = False,
    elastic: bool = False,
    minimum: int = 1,
    group: Any = None,
    inner: Any = None,
) -> Sync:
    """Attach `strategy` to the loop that trains `model` with `optimizer`, or with a list of optimizers.

    Every rank starts with rank 0's weights and buffers.

    - `buffers`: how the model's buffers, such as batch norm's statistics, are synchronized wherever the
      strategy synchronizes: "average", "broadcast" (rank 0's) or "local"
    - `timeout_s`: how long to wait for another rank before giving up, with an error that names the rank
    - `bandwidth`: emulate a slower network, such as "100mbit"; for demonstrations
    - `server`: HOST:PORT of `offbeat serve`, for strategies with a server; None: the address in
      OFFBEAT_SERVER, or else a server is started beside the workers. A process that no launcher started may
      join such a server by itself, leave and rejoin while others train
    - `steps_per_epoch`: steps of one rank per epoch, for strategies that depend on the epoch
    - `insecure`: do not encrypt connections to a server on other hosts; also by OFFBEAT_INSECURE=1
    - `elastic`: go on without ranks that die, hang or are cut off, and admit ranks that come back or are
      new; for strategies without a server. See docs/elastic.md
    - `minimum`: under elastic, the number of ranks below which those that are left stop, with an error
    - `group`: the replicas, as a ProcessGroup or a DeviceMesh of one dimension, if a replica has more
      ranks than one: this rank and those that hold the same part of a sharded model elsewhere
    - `inner`: ranks that train one replica together, each with the whole model: their gradients are
      averaged at every step, before the strategy sees them
    """
    optimizers = unwrap(optimizer)
    check_attachable(model, optimizers, strategy)
    strategy = for_optimizers(strategy, optimizers)
    if any(each in _attached for each in (model, *optimizers)):
        raise OffbeatError("this model or optimizer is attached already; close() that attachment first")
    check_unwrapped(model)
    groups = Groups.of(model, strategy, group, inner)
    if elastic and (bandwidth or groups.replicas):
        raise SettingError(f"{'bandwidth=' if bandwidth else 'group='} with elastic=True: not both")
    options = Options(
        buffers=buffers,
        timeout_s=timeout_s,
        bits_per_s=parse_rate(bandwidth) if bandwidth else None,
        server=server or os.environ.get(SERVER),
        steps_per_epoch=steps_per_epoch,
        insecure=insecure,
        elastic=elastic,
        minimum=minimum,
    )
    makes_group = not dist.is_initialized()
    with ExitStack() as undo:  # whatever fails, the model must be as it was before
        if makes_group:
            undo.callback(destroy_group)
        if groups.replicas:
            connected = connect_replicas(groups, model, optimizers, strategy, options, undo)
        else:
            connected = connect_workers(model, optimizers, strategy, options, undo)
        sync = Sync(connected, makes_group)
        undo.pop_all()
    if not sync.port.rank:
        log_caution(strategy, optimizers)
    return sync


class Sync:
    """A strategy attached to a model. Use it as a context manager, or call `close()` at the end."""

    def __init__(self, connected: Connected, made_group: bool) -> None:
        session, port = connected.session, connected.port
        self.strategy = session.strategy
        self.port = port
        self._session = session
        self._ledger = port.ledger
        self._made_group = made_group
        self._closed = False
        self.require_sync = True
        """True if a backward() exchanges gradients. Loops may toggle the attribute instead of `no_sync()`."""
        self._end_of_backward = EndOfBackward(self._on_backward_ended, session.ends_after_others)
        self._next_forward = NextForward(session.model, self._before_forward)
        with torch.no_grad(), self._ledger.paused():
            if not port.standalone:
                block_on(session.broadcast())
            if connected.connect_server is not None and isinstance(port, ProcessPort):
                port.client = connected.connect_server()
        self._optimizers = session.optimizers
        self._attached = (session.model, *self._optimizers)
        self._ownership = Ownership(session.model, self._optimizers)
        self._wrapping_checked = False
        self._same_batches = SameBatches(port)
        self._last_hooks = LastHooks()
        self._changes_later: nn.Parameter | None = None  # the backward's first one, if its hooks are not ours
        self._shows_consensus = False
        self._weights = WeightWatch.of(session.replica, self.strategy)
        self._weights.note(self._ledger.steps)
        self._handles = self._add_hooks()
        _attached.update(self._attached)

    # --- what users call

    @property
    def metrics(self) -> WorkerTotals:
        """This rank's totals so far: steps, seconds computing, communicating and waiting, bytes sent."""
        return self._ledger.totals()

    @property
    def seconds(self) -> float:
        """Training time since attach, without the time spent in `consensus()`."""
        return self._ledger.seconds

    @property
    def clock(self) -> int:
        """Steps of this training so far; under elastic, with those before this rank joined."""
        return self._session.clock

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self._closed

    def samples(self, count: int) -> None:
        """Report the number of samples of the coming backward(), for strategies that weight by samples."""
        self._session.add_samples(count)

    def loss(self, loss: Tensor | float) -> None:
        """Report the loss of this step, before or after its backward(), for strategies that use it."""
        self._session.replica.inputs.report_loss(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them, as in DDP: no backward() in this context sends.

        Accumulation is right without it, too; it saves the traffic of all backwards but the last.
        """
        before, self.require_sync = self.require_sync, False
        try:
            yield
        finally:
            self.require_sync = before

    def end_step(self) -> None:
        """End the step, also where a GradScaler skipped its optimizers; else the next backward() ends it."""
        if not self._closed:
            self._weights.check()
            block_on(self._session.finish_step())
            self._weights.note(self._ledger.steps)

    def settle(self) -> None:
        """Wait for pending communication, for example before timing steps."""
        self._check_open()
        self._weights.check()
        block_on(self._session.drain())
        self._weights.note(self._ledger.steps)

    @contextmanager
    def consensus(self, *, alone: bool = False) -> Iterator[None]:
        """Give every rank the same model, to evaluate or save it. All ranks enter together.

        Afterwards each rank has its own weights back, so evaluating a model does not change its training.
        What is in flight is not waited for, and not in the model: call `settle()` on all ranks before, if it
        is to be. Where a server holds the model, one rank may read it `alone`, while the others train on.
        """
        self._check_open()
        if alone and self.strategy.server_half() is None:
            raise SettingError(
                f"{self.strategy.name} has no server to read from: all ranks must enter together"
            )
        alone = alone or self.port.standalone
        self._ownership.check_model()
        self._weights.check()
        block_on(self._session.finish_step())
        with self._ledger.paused():
            if not alone:
                self.port.meet("consensus()")
            restore = block_on(self._session.publish(alone))
            self._shows_consensus = True
            try:
                if not alone:
                    block_on(self._session.check_identical())
                with self.no_sync():  # a backward() in here belongs to no step
                    yield
            finally:
                self._shows_consensus = False
                restore()
                self._weights.note(self._ledger.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, with which it can resume as if it had never stopped.

        Save it beside the model and the optimizer, which all ranks share. Where a server holds the model, all
        ranks call this together, and rank 0's state contains the server's.
        """
        self._check_open()
        self._weights.check()
        server = None if self.port.standalone else self.port.client
        saved = block_on(self._session.save(server))
        self._weights.note(self._ledger.steps)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state that `state_dict()` returned."""
        self._check_open()
        server_state = self._session.load(state_dict)
        # A standalone worker continues with the server's current weights.
        if self.port.client is not None and not self.port.standalone:
            with torch.no_grad(), self._ledger.paused():
                block_on(self._session.conductor.barrier())
                block_on(self.port.client.load(server_state))
                block_on(self._session.conductor.barrier())
                self.port.client.restart()
        self._weights.note(self._ledger.steps)

    def close(self, failure: BaseException | None = None, *, publish: bool = True) -> None:
        """Remove the hooks, and wait for the other ranks to do the same.

        Afterwards all ranks hold the model that `consensus()` shows. With `publish=False`, after a `failure`,
        and under elastic, where the others may train on, each keeps its own weights.
        """
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._next_forward.cancel()
        _attached.difference_update(self._attached)
        try:
            try:
                if failure is None and publish:
                    self._ownership.check_model()
                    self._weights.check()
                    publish_for_good(self.port, self._session)
            except BaseException as failed:
                failure = failed
                raise
            finally:
                disconnect(self.port, self._session, failure)
        finally:
            self._ledger.stop()
            self._session.release()
            if self._made_group:
                destroy_group()

    def __enter__(self) -> Sync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failure)

    # --- hooks, which drive the strategy

    def _add_hooks(self) -> list[Any]:
        add = self._last_hooks.add
        handles: list[Any] = []
        for param in self._session.parameters:
            handle = param.register_post_accumulate_grad_hook(self._on_gradient)
            handles.append(add(param._post_accumulate_grad_hooks, handle))
        for each in self._optimizers:
            handles.append(self._weights.note_steps(each))
            before, after = self._before_optimizer, self._after_optimizer
            handles.append(add(each._optimizer_step_pre_hooks, each.register_step_pre_hook(before)))
            handles.append(add(each._optimizer_step_post_hooks, each.register_step_post_hook(after)))
        return [*handles, self._ownership.watch()]

    def _on_gradient(self, param: nn.Parameter) -> None:
        self._same_batches.note(param.grad)
        if self._end_of_backward.expect():
            # Another's hook of this parameter may be yet to run: its gradient is taken when backward ends.
            last = self._last_hooks.keep_last(running=param._post_accumulate_grad_hooks)
            self._changes_later = None if last else param
            if not self._ownership.is_stepping:  # else this is a closure's backward
                self._weights.check()
            block_on(self._session.backward_begins(param, self.require_sync))
        if self.require_sync and param is not self._changes_later:
            self._session.gradient_ready(param)

    def _on_backward_ended(self) -> None:
        self._last_hooks.keep_last()
        if not self._wrapping_checked:  # the module may have been wrapped after attach
            self._wrapping_checked = True
            check_unwrapped(self._session.model)
        if self.require_sync:
            for block in self._session.complete_gradients():
                self._session.block_ready(block)
            block_on(self._session.begin_step())
            self._session.remember_gradients()
        else:
            block_on(self._session.accumulate())
        self._weights.note(self._ledger.steps)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._shows_consensus:
            raise OffbeatError(
                "optimizer.step() inside consensus(): the step would change the published model on this rank "
                "alone, and be lost when the rank's own weights come back. Step outside of it"
            )
        if not inside_backward() and not self._ownership.is_stepping:
            self._weights.check()
        self._ownership.on_step_start(optimizer)
        self._last_hooks.keep_last(running=optimizer._optimizer_step_pre_hooks)
        if inside_backward():
            for param in with_gradients(optimizer)[:1]:  # the user's hook may run before ours
                if self._end_of_backward.expect():
                    block_on(self._session.backward_begins(param, self.require_sync))
            block_on(self._session.steps_in_backward(optimizer))
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if not has_gradients(optimizer):
                self._ownership.check_model()  # the gradients may be those of other parameters
            block_on(self._session.before_update(optimizer))
            return None
        self._session.calls_closure(optimizer)

        def closure_and_hook() -> Any:
            return block_on(self._session.after_closure(optimizer, closure()))

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_and_hook}
        return (args[0], closure_and_hook, *args[2:]), kwargs

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._ownership.on_step_end()
        if inside_backward():
            return
        self._weights.check_hooks(optimizer)
        block_on(self._session.after_update(optimizer))
        self._weights.note(self._ledger.steps)
        self._same_batches.compare(self._ledger.steps)
        if self._session.is_partly_stepped:
            self._next_forward.expect()
        else:
            self._next_forward.cancel()

    def _before_forward(self) -> None:
        self._weights.check()
        block_on(self._session.forward_begins())
        self._weights.note(self._ledger.steps)

    def _check_open(self) -> None:
        if self._closed:
            raise OffbeatError("this attachment is closed; attach again to continue")
