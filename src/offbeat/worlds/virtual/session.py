"""A worker's session in virtual time: real gradients, and the cluster's seconds.

Gradients are computed for real and at once; the time that they would take on the cluster is charged to
virtual time, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.blocks import Block
from offbeat.core.ledger import Ledger
from offbeat.core.port import CollectivePort, Lane
from offbeat.core.replica import Replica
from offbeat.core.session import Session, wait_for_all
from offbeat.core.strategy import Strategy
from offbeat.core.validation import unwrap
from offbeat.server.client import ServerClient
from offbeat.server.optimizer_spec import spec_for
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.computing import Core
from offbeat.worlds.virtual.costs import codec_cost, push_costs
from offbeat.worlds.virtual.cuda_graphs import Gradient, GradientSource, GraphedGradient, PlainGradient, Trust
from offbeat.worlds.virtual.looking import Look, Lookout
from offbeat.worlds.virtual.port import VirtualPort
from offbeat.worlds.virtual.scheduler import Clock, Never
from offbeat.worlds.virtual.server import VirtualServer
from offbeat.worlds.virtual.transport import VirtualTransport


def autograd(loss: Callable[[nn.Module, Any], Tensor]) -> Gradient:
    """Return the gradient of a loss, computed by `loss(model, batch).backward()`."""

    def gradient(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            value = loss(model, batch)
            value.backward()
        return value.detach()

    return gradient


class WorkerLeft(Exception):
    """A worker has left for good."""


class VirtualSession:
    """One worker's training in virtual time. All workers of a cluster share its collectives and server."""

    def __init__(
        self,
        rank: int,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        strategy: Strategy[Any],
        gradient: Gradient,
        cluster: Cluster,
        collectives: dict[Lane, CollectiveQueue],
        lookout: Lookout | None,  # None where `look` is another
        server: VirtualServer | None = None,
        *,
        seed: int = 0,
        buffers: str = "average",
        steps_per_epoch: int | None = None,
        ledger: Ledger | None = None,
        graphs: Trust | None = None,
    ) -> None:
        self.rank = rank
        self.model = model
        self.optimizers = unwrap(optimizers)
        self._scheduler: Clock = collectives[Lane.FRONT].scheduler
        self.ledger = ledger or Ledger(rank, self._scheduler.clock)
        self.core = Core(self._scheduler, rank)
        self.codec_cost = codec_cost(cluster.codecs, strategy)
        self.port = self._make_port(collectives)
        self._gradient: GradientSource = PlainGradient(gradient, model)
        if graphs is not None:
            self._gradient = GraphedGradient(gradient, model, graphs)
        self._cluster = cluster
        self._absences = cluster.absences(rank)
        self._server = server
        self._seed = seed
        self._step = 0
        self._update_s = 0.0
        self._params = [p for p in model.parameters() if p.requires_grad]
        layout = strategy.layout(model)
        replica = Replica(model, buffers, self.optimizers, layout, steps_per_epoch)
        self._lay_out(replica)
        self._device = replica.weights[0].device
        self._client, half = None, strategy.server_half()
        if server is not None and half is not None and isinstance(self.port, VirtualPort):
            self._client = ServerClient(
                VirtualTransport(rank, server),
                half,
                self.ledger,
                worker=rank,
                world=self.world,
                weights=replica.weights,
            )
            self.port.connect(self._client)
            server.add_worker(rank, self.core, push_costs(cluster.codecs, strategy))
        self._session = self._make_session(strategy, replica)
        self._lookout = lookout
        self._ready_at = ready_fractions(cluster, rank, replica.blocks) if layout.gradients else ()
        collectives[Lane.FRONT].ledgers.extend(self.ledgers)

    def _make_port(self, collectives: dict[Lane, CollectiveQueue]) -> CollectivePort:
        return VirtualPort(self.rank, collectives, self.ledger, self.core, self.codec_cost)

    def _make_session(self, strategy: Strategy[Any], replica: Replica) -> Session[Any]:
        return Session(strategy, replica, self.port, self.ledger)

    def _lay_out(self, replica: Replica) -> None:
        """Change the layout of the replica's memory, before the strategy sees it."""

    @property
    def ledgers(self) -> list[Ledger]:
        """The ledgers of all workers that this session trains."""
        return [self.ledger]

    @property
    def world(self) -> int:
        """Number of workers that train together."""
        return self.port.world

    @property
    def seconds(self) -> float:
        """Training time so far, in virtual seconds."""
        return self.ledger.seconds

    async def start(self) -> None:
        """Copy worker 0's weights, and wait for all workers. The time of this method does not count."""
        with self.ledger.paused():
            await self._session.broadcast()
            if self._server is not None and self.rank == 0:
                replica, half = self._session.replica, self._session.strategy.server_half()
                self._server.open(replica.weights, spec_for(half, replica) if half is not None else None)
            await self.wait_for_all()
        await self._wait_out_absence()

    async def backward(self, batch: Any, samples: int) -> Tensor:
        """Compute the gradient of one batch; `samples` is the batch's size. Return the loss, detached."""
        seconds = self._cluster.step_seconds(self.rank, self._step, self.ledger.seconds, self._seed)
        self._step += 1
        for param in self._params:
            param.grad = None
        self._session.add_samples(samples)
        self._gradient.start(batch)
        if self.port.elastic:  # as over processes: after the gradient, before anything of it is exchanged
            await self._session.step_begins()
        began = self._scheduler.now
        self._update_s = seconds * self._cluster.update_share
        ends = [began + seconds * fraction for fraction in self._ready_at]
        core, late_s = self.core, 0.0
        if ends:  # meanwhile other workers start to compute theirs
            late_s += await core.compute(ends[0])
        elif self._gradient.in_background:
            late_s += await core.compute(began + seconds - self._update_s)
        loss = self._gradient.finish()
        self._session.replica.inputs.report_loss(loss)
        for number, block in enumerate(self._session.complete_gradients()):
            if number:
                late_s += await core.compute(ends[number] + late_s)
            self._session.block_ready(block)
            late_s += core.delay_s  # encoding holds up what is left of backward
        end_s = began + seconds - self._update_s + late_s
        if self._scheduler.now < end_s:
            await core.compute(end_s)
        if self.ledger.spans is not None:
            forward_ended = began + seconds * self._cluster.forward_share
            self.ledger.record_span("forward", "", began, forward_ended)
            self.ledger.record_span("backward", "", forward_ended)
        await self._session.begin_step()
        await core.rest()
        return loss

    async def update(self) -> None:
        """Step the optimizers."""
        for number, optimizer in enumerate(self.optimizers):
            await self._session.before_update(optimizer)
            if self._update_s and not number:
                await self.core.compute(self._scheduler.now + self._update_s)
            optimizer.step()
            await self._session.after_update(optimizer)
        await self.core.rest()
        if self._absences:
            await self._wait_out_absence()

    async def look(self, look: Look, *, alone: bool = False, wait: bool = False) -> None:
        """Evaluate the model that all workers publish now: at worker 0, call `look` while the model holds it.

        All workers call this at the same step. It takes no time and changes nothing: each trains on at once,
        and `look` is called when the last worker has come; with `wait`, this method returns after that. With
        `alone`, worker 0 alone calls this, and sees the server's weights.
        """
        assert self._lookout is not None
        if alone:
            await self._lookout.look_alone(self.rank, self._session, self._client, look)
        else:
            await self._lookout.look(self.rank, self._session, self._client, look, wait)

    async def finish(self) -> None:
        """End training: finish everything in flight, and wait for all workers. Only the first counts."""
        await self._session.drain()
        with self.ledger.paused():
            if self._server is not None:  # a worker that rejoined may be behind, and wait
                self._server.leave(self.rank)
            await self.wait_for_all()

    async def wait_for_all(self) -> None:
        """Wait until all workers have called this method."""
        await wait_for_all(self.port, self._device)

    async def _wait_out_absence(self) -> None:
        """Do nothing while the cluster description says that this worker is away.

        A server forgets the worker meanwhile, and the worker rejoins as a newly started process would.
        Without a server the other workers wait; a worker that never returns causes a deadlock.
        """
        for away in self._absences:
            now_s = self.ledger.seconds
            if away.from_s <= now_s < away.until_s:
                if self._server is not None:
                    await self._session.drain()  # finishes the operations that the worker has started
                    self._server.leave(self.rank)
                if away.until_s == math.inf:
                    if self._server is not None and self.rank:  # worker 0 evaluates the model
                        raise WorkerLeft
                    await Never(f"nothing: it left for good at {away.from_s:g} s")
                await self._scheduler.sleep(self._scheduler.now + away.until_s - now_s)
                if self._server is not None:
                    self._server.join(self.rank)
                    if self._client is not None:
                        self._client.rejoin()
                    await self._session.rejoin()


def ready_fractions(cluster: Cluster, rank: int, blocks: list[Block]) -> tuple[float, ...]:
    """Return the fraction of a step at which each block is complete: as measured, or else evenly by bytes."""
    forward, end = cluster.forward_share, 1 - cluster.update_share
    measured = cluster.ready_fractions(rank)
    if len(measured) == len(blocks):
        # Measured on this rank, but the update begins at the same fraction on all ranks: take the earlier.
        return tuple(min(fraction, end) for fraction in measured)
    total = sum(block.numel for block in blocks)
    done = accumulate(block.numel for block in blocks)
    return tuple(end if d == total else forward + (end - forward) * d / total for d in done)
