"""attach: one line for a user's own loop.

    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=8)) as sync:
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()    # the strategy's step begins when this ends
            optimizer.step()                 # and goes on when this ends

Autograd's and the optimizer's own hooks drive the strategy; the loop stays as it is.
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

from offbeat.core import checkpoint
from offbeat.core.backward import EndOfBackward
from offbeat.core.blocks import trainable_bytes
from offbeat.core.conductor import Conductor
from offbeat.core.gradients import GradientBuckets
from offbeat.core.ledger import WorkerTotals
from offbeat.core.pending import block_on
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.core.units import parse_rate
from offbeat.core.validation import check_attachable, check_frozen, fingerprint
from offbeat.errors import OffbeatError, SettingError
from offbeat.worlds.processes.failure import GRACE_S
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import connect_group, connect_standalone
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
) -> Sync:
    """Let `strategy` act around the loop that trains `model` with `optimizer`.

    Every rank starts with rank 0's weights and buffers.

    buffers     what happens to batch norm's statistics and the like wherever the strategy synchronizes:
                "average", "broadcast" (rank 0's) or "local"
    timeout_s   how long to wait for another rank before giving up, with an error that names it
    bandwidth   emulate a slower network, such as "100mbit"; for demonstrations
    server      HOST:PORT of `offbeat serve`, for strategies with a server; None: what OFFBEAT_SERVER says, or
                else one is started beside the workers. A process that no launcher started may come to a
                server by itself, and come back, while others train
    """
    check_attachable(model, optimizer, strategy)
    if model in _attached or optimizer in _attached:
        raise OffbeatError("this model or optimizer is attached already; close() that attachment first")
    description = fingerprint(model, optimizer, strategy, buffers)
    grain = strategy.grain(trainable_bytes(model))
    replica = Replica(model, buffers, optimizer, grain, strategy.apart(model))
    bits_per_s = parse_rate(bandwidth) if bandwidth else None
    made_group = not dist.is_initialized()
    address = server or os.environ.get(SERVER)
    half = strategy.server_half()
    rendezvous = Rendezvous.at(address, timeout_s) if address and half is not None else None
    if rendezvous is not None and made_group and "RANK" not in os.environ:
        port = connect_standalone(
            rendezvous.store, rendezvous.worker, rendezvous.number("workers"), timeout_s, bits_per_s
        )
    else:
        device = next(model.parameters()).device
        port = connect_group(device, description, timeout_s, bits_per_s)
    spec = ServerSpec.of(strategy, replica, description, timeout_s)
    return Sync(
        model,
        optimizer,
        strategy,
        replica,
        port,
        made_group,
        (lambda: connect_server(port, spec, half, replica.weights, rendezvous)) if half is not None else None,
    )


class Sync:
    """What `attach` returns: the strategy at work. A context manager; or call `close()` in the end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy[Any],
        replica: Replica,
        port: ProcessPort,
        made_group: bool,
        connect: Callable[[], ProcessServerClient] | None,
    ) -> None:
        self.strategy = strategy
        self._model = model
        self._optimizer = optimizer
        self._replica = replica
        self.port = port
        self._ledger = port.ledger
        self._made_group = made_group
        self._closed = False
        self._syncing = True
        self._end_of_backward = EndOfBackward(self._on_backward_ended)
        self._conductor = Conductor(strategy, replica, port, port.ledger)
        self._gradients: GradientBuckets | None = None
        if strategy.wants_blocks():
            self._gradients = GradientBuckets(replica, self._conductor.ready)
        with torch.no_grad(), self._ledger.paused():
            if not port.standalone:
                block_on(replica.broadcast(port))
            if connect is not None:
                port.client = connect()
        self._frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._handles = self._hook()
        _attached.update((model, optimizer))

    # --- what users call

    @property
    def metrics(self) -> WorkerTotals:
        """This rank's totals so far: steps, seconds computing, communicating and waiting, bytes sent."""
        return self._ledger.totals()

    @property
    def seconds(self) -> float:
        """Training time since attach, without what was spent in `consensus()`."""
        return self._ledger.seconds

    def samples(self, count: int) -> None:
        """Tell how many samples the coming backward() is made of, for strategies that weight by them."""
        self._replica.coming += count
        self._ledger.samples += count

    def loss(self, loss: Tensor | float) -> None:
        """Tell the loss of this step, before or after its backward(), for strategies that look at it."""
        if self.strategy.wants_loss():
            self._replica.tell_loss(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: a backward() in here is not a step. As in DDP."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def settle(self) -> None:
        """Wait until all that is under way has come, as one must who takes the time of some steps."""
        self._check_open()
        block_on(self._conductor.drain())

    @contextmanager
    def consensus(self, *, alone: bool = False) -> Iterator[None]:
        """Inside, every rank holds the same model, to evaluate or save; all ranks enter together.

        Afterwards each has its own weights back, so looking at a model does not change its training. Where a
        server holds the model, one rank may look at it `alone`, while the others train on.
        """
        self._check_open()
        if alone and self.strategy.server_half() is None:
            raise SettingError(f"{self.strategy.name} has no server to ask: all ranks must enter together")
        alone = alone or self.port.standalone
        self.settle()  # what is under way is training, and counts
        with self._ledger.paused():
            restore = block_on(self._conductor.publish(alone))
            try:
                yield
            finally:
                restore()

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs, beyond what all ranks share, to go on as if it had never stopped.

        Where a server holds the model, all ranks call it together: rank 0 keeps what the server has.
        """
        self._check_open()
        server = None if self.port.standalone else self.port.client
        return block_on(checkpoint.save(self._conductor, self._optimizer, server))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_open()
        served = checkpoint.load(self._conductor, self._optimizer, state_dict)
        # A standalone worker goes on with the weights that the server has.
        if self.port.client is not None and not self.port.standalone:
            with torch.no_grad(), self._ledger.paused():
                block_on(self._conductor.barrier())
                block_on(self.port.client.load(served))
                block_on(self._conductor.barrier())
                self.port.client.restart()

    def close(self, failure: BaseException | None = None) -> None:
        """Take the hooks off, and wait for the others to do the same. Weights stay as they are."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        _attached.difference_update((self._model, self._optimizer))
        try:
            self._part(failure)
        finally:
            self._ledger.stop()
            with torch.no_grad():
                self._replica.release()
            if self._made_group and dist.is_initialized():
                dist.destroy_process_group()

    def __enter__(self) -> Sync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failure)

    # --- what drives the strategy

    def _hook(self) -> list[Any]:
        handles: list[Any] = [
            param.register_post_accumulate_grad_hook(self._on_gradient)
            for block in self._replica.blocks
            for param in block.params
        ]
        handles.append(self._optimizer.register_step_pre_hook(self._before_optimizer))
        handles.append(self._optimizer.register_step_post_hook(self._on_optimizer_stepped))
        return handles

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self._syncing:
            return
        if self._end_of_backward.expect():
            self._replica.check_layout()
            if self._gradients is not None:
                self._gradients.on_backward_start()
        if self._gradients is not None:
            self._gradients.on_gradient(param)

    def _on_backward_ended(self) -> None:
        check_frozen(self._frozen)
        if self._gradients is not None:
            self._gradients.on_backward_end()
        block_on(self._conductor.begin())

    def _before_optimizer(self, *_: Any) -> None:
        if self._conductor.cut_short:
            raise OffbeatError(
                "state_dict() was called between backward() and optimizer.step(), so that state lacks this "
                "step; save after optimizer.step()"
            )
        block_on(self._conductor.about_to_update())

    def _on_optimizer_stepped(self, *_: Any) -> None:
        block_on(self._conductor.update())

    def _part(self, failure: BaseException | None) -> None:
        """Finish what is under way if all is well; tell the others why, if it is not."""
        failures = self.port.failures
        if self.port.world == 1 or (self.port.standalone and failure is None):
            with self._ledger.paused():
                block_on(self._conductor.drain())
            self.port.close()
            return
        if failure is not None:
            failures.leave(self.port.operations, f"{type(failure).__name__}: {failure}")
            self.port.abandon()
            if self.port.client is not None:
                self.port.client.leave()
            return
        with self._ledger.paused():
            block_on(self._conductor.drain())
        failures.leave(self.port.operations, "")
        if self.port.client is not None:
            self.port.client.leave()  # at once: others with steps left may wait for this one's clock
        try:
            failures.wait_for_exit(self.port.timeout_s)
        except BaseException:
            if self.port.client is not None:
                self.port.client.close(GRACE_S)
            raise
        self.port.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OffbeatError("this attachment is closed; attach again to go on")
