"""attach: connect a strategy to a user's own training loop in one line.

    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8)) as sync:
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()    # the strategy's step begins when this ends
            optimizer.step()                 # and resumes when this ends

Hooks of autograd and of the optimizer drive the strategy; the loop stays as it is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.backward import EndOfBackward
from offbeat.core.ledger import WorkerTotals
from offbeat.core.pending import block_on
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.core.units import parse_rate
from offbeat.core.validation import check_attachable, fingerprint
from offbeat.errors import OffbeatError, SettingError
from offbeat.worlds.processes.failure import GRACE_S
from offbeat.worlds.processes.groups import Groups
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import connect_group, connect_standalone
from offbeat.worlds.processes.replicas import connect_replicas
from offbeat.worlds.processes.server.bootstrap import SERVER, Rendezvous, connect_server
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.transport import ProcessServerClient

_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy[Any],
    *,
    buffers: str = "average",
    timeout_s: float = 300.0,
    bandwidth: str | None = None,
    server: str | None = None,
    steps_per_epoch: int | None = None,
    group: Any = None,
    inner: Any = None,
) -> Sync:
    """Attach `strategy` to the loop that trains `model` with `optimizer`.

    Every rank starts with rank 0's weights and buffers.

    buffers           how the model's buffers, such as batch norm's statistics, are synchronized wherever the
                      strategy synchronizes: "average", "broadcast" (rank 0's) or "local"
    timeout_s         how long to wait for another rank before giving up, with an error that names the rank
    bandwidth         emulate a slower network, such as "100mbit"; for demonstrations
    server            HOST:PORT of `offbeat serve`, for strategies with a server; None: the address in
                      OFFBEAT_SERVER, or else a server is started beside the workers. A process that no
                      launcher started may join such a server by itself, leave and rejoin while others train
    steps_per_epoch   steps of one rank per epoch, for strategies that depend on the epoch
    group             the replicas, as a ProcessGroup or a DeviceMesh of one dimension, if a replica has more
                      ranks than one: this rank and those that hold the same part of a sharded model elsewhere
    inner             ranks that train one replica together, each with the whole model: their gradients are
                      averaged at every step, before the strategy sees them
    """
    check_attachable(model, optimizer, strategy)
    if model in _attached or optimizer in _attached:
        raise OffbeatError("this model or optimizer is attached already; close() that attachment first")
    groups = Groups.of(model, strategy, group, inner)
    if groups.replicas:
        return Sync(
            *connect_replicas(
                groups, model, optimizer, strategy, buffers, timeout_s, bandwidth, server, steps_per_epoch
            )
        )
    description = fingerprint(model, optimizer, strategy, buffers)
    replica = Replica(model, buffers, optimizer, strategy.layout(model), steps_per_epoch)
    bits_per_s = parse_rate(bandwidth) if bandwidth else None
    made_group = not dist.is_initialized()
    address = server or os.environ.get(SERVER)
    half = strategy.server_half()
    rendezvous = Rendezvous.at(address, timeout_s) if address and half is not None else None
    if rendezvous is not None and made_group and "RANK" not in os.environ:
        workers = rendezvous.number("workers")
        port = connect_standalone(rendezvous.store, rendezvous.worker, workers, timeout_s, bits_per_s)
    else:
        device = next(model.parameters()).device
        port = connect_group(device, description, timeout_s, bits_per_s)
    spec = ServerSpec.of(strategy, replica, description, timeout_s)
    return Sync(
        Session(strategy, replica, port, port.ledger),
        port,
        made_group,
        (lambda: connect_server(port, spec, half, replica.weights, rendezvous)) if half is not None else None,
    )


class Sync:
    """A strategy attached to a model. Use it as a context manager, or call `close()` at the end."""

    def __init__(
        self,
        session: Session[Any],
        port: ProcessPort,
        made_group: bool,
        connect: Callable[[], ProcessServerClient] | None,
    ) -> None:
        self.strategy = session.strategy
        self.port = port
        self._session = session
        self._ledger = port.ledger
        self._made_group = made_group
        self._closed = False
        self._syncing = True
        self._end_of_backward = EndOfBackward(self._on_backward_ended, session.ends_after_others)
        with torch.no_grad(), self._ledger.paused():
            if not port.standalone:
                block_on(session.broadcast())
            if connect is not None:
                port.client = connect()
        self._model = session.model
        self._optimizer = session.optimizer
        self._handles = self._add_hooks()
        _attached.update((self._model, self._optimizer))

    # --- what users call

    @property
    def metrics(self) -> WorkerTotals:
        """This rank's totals so far: steps, seconds computing, communicating and waiting, bytes sent."""
        return self._ledger.totals()

    @property
    def seconds(self) -> float:
        """Training time since attach, without the time spent in `consensus()`."""
        return self._ledger.seconds

    def samples(self, count: int) -> None:
        """Report the number of samples of the coming backward(), for strategies that weight by samples."""
        self._session.add_samples(count)

    def loss(self, loss: Tensor | float) -> None:
        """Report the loss of this step, before or after its backward(), for strategies that use it."""
        self._session.replica.inputs.report_loss(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: a backward() inside this context is not a step, as in DDP."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def settle(self) -> None:
        """Wait for pending communication, for example before timing steps."""
        self._check_open()
        block_on(self._session.drain())

    @contextmanager
    def consensus(self, *, alone: bool = False) -> Iterator[None]:
        """Give every rank the same model, to evaluate or save it. All ranks enter together.

        Afterwards each rank has its own weights back, so evaluating a model does not change its training.
        Where a server holds the model, one rank may read it `alone`, while the others train on.
        """
        self._check_open()
        if alone and self.strategy.server_half() is None:
            raise SettingError(
                f"{self.strategy.name} has no server to read from: all ranks must enter together"
            )
        alone = alone or self.port.standalone
        self.settle()  # pending communication belongs to training, and counts
        with self._ledger.paused():
            restore = block_on(self._session.publish(alone))
            try:
                yield
            finally:
                restore()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, with which it can resume as if it had never stopped.

        Save it beside the model and the optimizer, which all ranks share. Where a server holds the model, all
        ranks call this together, and rank 0's state contains the server's.
        """
        self._check_open()
        server = None if self.port.standalone else self.port.client
        return block_on(self._session.save(server))

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

    def close(self, failure: BaseException | None = None) -> None:
        """Remove the hooks, and wait for the other ranks to do the same. Weights stay as they are."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        _attached.difference_update((self._model, self._optimizer))
        try:
            self._disconnect(failure)
        finally:
            self._ledger.stop()
            self._session.release()
            if self._made_group and dist.is_initialized():
                dist.destroy_process_group()

    def __enter__(self) -> Sync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failure)

    # --- hooks, which drive the strategy

    def _add_hooks(self) -> list[Any]:
        handles: list[Any] = [
            param.register_post_accumulate_grad_hook(self._on_gradient) for param in self._session.parameters
        ]
        handles.append(self._optimizer.register_step_pre_hook(self._before_optimizer))
        handles.append(self._optimizer.register_step_post_hook(self._after_optimizer))
        return handles

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self._syncing:
            return
        if self._end_of_backward.expect():
            self._session.backward_begins()
        self._session.gradient_ready(param)

    def _on_backward_ended(self) -> None:
        for block in self._session.complete_gradients():
            self._session.block_ready(block)
        block_on(self._session.begin_step())

    def _before_optimizer(self, *_: Any) -> None:
        block_on(self._session.before_update())

    def _after_optimizer(self, *_: Any) -> None:
        block_on(self._session.after_update())

    # --- closing

    def _disconnect(self, failure: BaseException | None) -> None:
        """Finish pending communication; after a failure, tell the other ranks the reason instead."""
        if self.port.world == 1 or (self.port.standalone and failure is None):
            with self._ledger.paused():
                block_on(self._session.drain())
            self.port.close()
            return
        if failure is not None:
            self.port.leave(f"{type(failure).__name__}: {failure}")
            self.port.abandon()
            if self.port.client is not None:
                self.port.client.leave()
            return
        with self._ledger.paused():
            block_on(self._session.drain())
        self.port.leave("")
        if self.port.client is not None:
            self.port.client.leave()  # at once: ranks with steps left may wait for this one's clock
        try:
            self.port.wait_for_exit()
        except BaseException:
            if self.port.client is not None:
                self.port.client.close(GRACE_S)
            raise
        self.port.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OffbeatError("this attachment is closed; attach again to continue")
