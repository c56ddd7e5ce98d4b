"""DiLoCo: local steps, and an outer optimizer for the accumulated change; in fragments, behind computation.

    every step:           w_i ← the optimizer's step with g_i
    every H/P steps, t:   the next of P fragments of the model is merged. On it,
        Δ ← w_global − (1/N) Σ w_j       the outer gradient, with the w_j after step t−τ, when sending starts
        v ← μ v + Δ                      Nesterov momentum
        w_global ← w_global − η (Δ + μ v)
        w_i ← (1−α) w_global + α w_i
        w̄ ← w̄ + (1−β)/(1−βᵏ) (w_global − w̄)     the published model; no worker trains on it

H is `period`, P `fragments`, τ `delay`, η `outer_lr`, μ `outer_momentum`, α `mix`, β `average`, and k counts
the merges of this fragment, one in H steps. P = 1 and τ = 0 is plain DiLoCo. With P > 1 fragments are
streamed, and with τ > 0 their exchange has τ steps of computation to hide behind. τ < H/P, so one fragment
at a time is in flight.

The published model is the weighted mean w̄ of w_global after each merge, in which a merge has β times the
weight of the next; with β = 0 it is w_global.

Each worker owns an even slice of every fragment, of w_global, v and w̄, as in ZeRO-1. An exchange is a
reduce-scatter of the w_j to the owners, the owners' outer step and an all-gather of the new w_global: the
bytes of one all-reduce. With τ ≥ 2 the all-gather starts halfway through the delay, so that both are hidden.
To publish w̄, it is gathered into the weights.

    beyond the bare loop, in copies of the model, of N workers:   2/N, and 1/P more if τ > 0 or α > 0
                                                                  1/N more with β > 0, 1/N less without μ
                                                                  with a codec: 2 + 1/P and the codec's own
                                                                  with `eager`: 3 more

From the papers: all of the above but w̄; η = 0.7, μ = 0.9.

Ours:
- w̄. Momentum carries w_global past its target and back; a mean over some merges reaches the target sooner.
  It is off by default.
- Fragments are even slices of the flat weights, in backward order, that may cut through a parameter: the
  outer optimizer is elementwise, and so every exchange has the same size.
- w_i travels, and not w_global − w_i. The result is the same, since w_global is the same everywhere, and with
  η = 1 and μ = 0 w_global becomes the mean. No owner has to step then, so the mean is all-reduced: P = 1,
  τ = 0, α = 0 is LocalSGD, bit for bit, and with H = 1 under plain SGD it is BSP.
- Where nothing is computed during an exchange and nothing of w_i is kept (τ = 0, α = 0), it is done in place,
  on the weights.
- Batch norm's statistics are averaged with the last fragment, once in H steps, and have the same delay.
- The inner optimizer's state stays local.
- With a codec, w_i − w_global travels, fragment by fragment, and the mean of the decoded packets stands for
  −Δ. Error feedback has a memory for each fragment. A codec with two phases starts the second one halfway
  through the delay. The mean arrives whole, and every worker steps all of w_global: owners would have to
  send it uncompressed, which costs more than a codec saves.
- `offload="cpu"` moves the outer state to the host's memory, where the owner steps it.

With `eager=True` a worker does not wait for the mean of its own period: see diloco/eager.py. With limits for
outliers, workers whose change is one are left out of a merge: see diloco/guard.py. With `on="server"` a
server has the outer optimizer, and nobody waits for all: see diloco/quorum.py.

Under elastic, Δ is over the workers that are left; a fragment in flight when a worker is lost is sent again
as it was. All workers then hold the whole outer state (w_global, v, w̄), 2 copies of the model, so a lost
worker takes nothing of it along but its local steps and stored errors. A newcomer gets the outer state and
the clock, and starts from another worker's w_i and inner optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.codecs.all_reduce import MeanAllReduce, check_elastic_codec
from offbeat.core.blocks import Layout
from offbeat.core.partition import WHOLE, EvenSlice, even_slices, grain_of
from offbeat.core.pending import Arrived
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.errors import SettingError
from offbeat.server.half import ServerHalf
from offbeat.strategies.diloco.outer_state import is_offloaded, owned_slices
from offbeat.strategies.diloco.quorum import server_half_of, step_with_server
from offbeat.strategies.diloco.settings import DiLoCoSettings, DiLoCoState

__all__ = ["DiLoCo", "DiLoCoState"]


@dataclass(frozen=True, kw_only=True)
class DiLoCo(DiLoCoSettings):
    """Strategy of local steps, in which an outer optimizer steps the global weights every `period` steps."""

    name = "diloco"
    summary = "step locally; an outer optimizer steps the global weights every `period` steps, in fragments"

    def init(self, replica: Replica) -> DiLoCoState:
        if self.guards and replica.members.count > 1:
            raise SettingError(
                "outlier_norm or outlier_cosine with several ranks per replica: each of them sees only its "
                "part of a change, and they could decide differently; leave the limits out"
            )
        slices = [[self._slice(w, index) for w in replica.weights] for index in range(self.fragments)]
        return DiLoCoState(
            reductions=[MeanAllReduce.of_tensors(part, self.codec, Lane.BACK) for part in slices]
        )

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(model, keeps_loaded=not self.on_server)

    def server_half(self) -> ServerHalf | None:
        return server_half_of(self) if self.on_server else None

    async def step(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        if self.on_server:
            await step_with_server(self, state, replica, port)
            return
        if not state.outer.w_global:  # here, since all workers have the same weights by now
            state.outer.allocate(
                replica.weights,
                owned_slices(self.fragments, self._owner(port)),
                momentum=self.outer_momentum > 0,
                average=self.average > 0,
                offload=self.offload == "cpu",
            )
            if self.guards:
                state.guard.anchor = [weight.clone() for weight in replica.weights]
            if self._is_eager(port):
                state.own.allocate(replica.weights, momentum=self.outer_momentum > 0)
        await replica.update()
        state.step += 1
        if self._is_eager(port):
            await self._step_eagerly(state, replica, port)
            return
        number, remainder = divmod(state.step + self.delay, self.stride)
        if remainder == 0:
            state.index = (number - 1) % self.fragments
            if self.guards and port.world > 1:
                own = [self._slice(weight, state.index) for weight in replica.weights]
                anchors = [self._slice(anchor, state.index) for anchor in state.guard.anchor]
                await state.guard.judge(own, anchors, self.outlier_norm, self.outlier_cosine, port)
            self._send(state, replica, port)
        if state.step % self.stride == 0:
            await self._exchange(state, replica, port)
            await self._receive(state, port)
            await self._merge(state, replica, port)
        elif (state.step + self.delay // 2) % self.stride == 0:  # so that two phases hide behind computation
            await self._exchange(state, replica, port)

    async def _step_eagerly(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Finish the exchange of the last period, and start that of this one, where it ends."""
        rounds, remainder = divmod(state.step, self.period)
        if remainder == self.period - self.period // 2 and rounds:
            await self._exchange(state, replica, port)
        if remainder:
            return
        if rounds > 1:
            await self._exchange(state, replica, port)
            await self._receive(state, port)
            await self._accept(state, replica, port, merges=rounds - 1)
        for i, (weight, w_global) in enumerate(zip(replica.weights, self._sent(state, replica), strict=True)):
            if rounds == 1:  # no mean has arrived yet
                w_global.copy_(state.own.start[i])
            state.own.restart(i, weight, w_global, 1 / port.world, self.outer_lr, self.outer_momentum)
        self._send(state, replica, port)

    def _send(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Start the exchange of a fragment: to its owners or, where no owner has to step, to all workers."""
        for i, (weight, sent) in enumerate(zip(replica.weights, self._sent(state, replica), strict=True)):
            own = self._slice(weight, state.index)
            if self._uses_codec(port):
                w_global = state.outer.w_global[i][state.index]
                if not self._is_eager(port):
                    if is_offloaded(w_global, own):
                        w_global = sent.copy_(w_global)
                    torch.sub(own, w_global, out=sent)
                if state.guard.is_out:
                    sent.zero_()
                state.reductions[state.index].start(sent, port, i)
                continue
            if not self._in_place and not self._is_eager(port):
                sent.copy_(own)
            if state.guard.is_out:
                sent.zero_()
            if self._takes_mean or port.elastic:
                state.gathered.append(port.all_reduce(sent, lane=Lane.BACK) if len(sent) else Arrived(sent))
            else:
                scatter = port.reduce_scatter(_slices(sent, port), lane=Lane.BACK) if len(sent) else None
                state.scattered.append(scatter or Arrived(sent))
        if state.index == self.fragments - 1 and port.world > 1:
            state.buffers = replica.buffers.send(port, Lane.BACK)

    async def _exchange(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Start the second phase: each owner steps its slice of the mean, and all workers gather them."""
        if self._uses_codec(port):
            await state.reductions[state.index].exchange(port)
            return
        started, state.scattered = state.scattered, []
        for i, (pending, sent) in enumerate(zip(started, self._sent(state, replica), strict=bool(started))):
            slices = _slices(sent, port)
            mean = slices[port.rank]
            _copy(await pending, mean)
            self._propose(state, i, mean, port, self._is_eager(port))
            state.gathered.append(port.all_gather(slices, Lane.BACK) if len(sent) else Arrived(slices))

    async def _receive(self, state: DiLoCoState, port: Port) -> None:
        """Wait for the operations in flight. With a codec, decode the mean change."""
        if self._uses_codec(port) and state.reductions[state.index].pending:
            state.means = await state.reductions[state.index].finish(port)
        for pending in [*state.scattered, *state.gathered]:
            await pending

    async def _merge(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Accept the next w_global of the fragment that has arrived, and merge it into the own weights."""
        await self._accept(state, replica, port, (state.step // self.stride - 1) // self.fragments + 1)
        for weight, sent in zip(replica.weights, self._sent(state, replica), strict=True):
            if not self._in_place:
                own = self._slice(weight, state.index)
                own.copy_(sent) if state.guard.is_out else own.lerp_(sent, 1 - self.mix)

    async def _accept(self, state: DiLoCoState, replica: Replica, port: Port, merges: int) -> None:
        """Accept the next w_global, in the memory in which the fragment was sent; `merges` counts its own."""
        latest = (1 - self.average) / (1 - self.average**merges) if self.average else None
        for i, sent in enumerate(self._sent(state, replica)):
            if self._uses_codec(port):
                _copy(state.means[i], sent)
                self._propose(state, i, sent, port, is_change=True)
            elif self._takes_mean or port.elastic:
                _copy(await state.gathered[i], sent)
                if self._takes_mean:
                    self._correct(state, i, sent, port)
                else:
                    self._propose(state, i, sent, port, self._is_eager(port))
            else:
                gathered = await state.gathered[i]
                if not _ends_with(gathered, sent):
                    _copy(gathered, _slices(sent, port))
            state.outer.accept(i, state.index, self._owner(port).of(sent), latest)
            if self.guards:
                self._slice(state.guard.anchor[i], state.index).copy_(sent)
        await replica.buffers.receive(state.buffers)
        state.means, state.gathered, state.buffers = [], [], []

    def _propose(self, state: DiLoCoState, kind: int, mean: Tensor, port: Port, is_change: bool) -> None:
        """Replace a mean by the next w_global of the fragment in flight."""
        self._correct(state, kind, mean, port)
        state.outer.propose(kind, state.index, mean, self.outer_lr, self.outer_momentum, is_change)

    def _correct(self, state: DiLoCoState, kind: int, mean: Tensor, port: Port) -> None:
        """Make a mean that of the workers that count; those that were left out have sent zeros."""
        left = state.guard.left
        if not self.guards or port.world == 1 or left == port.world:
            return
        if left:
            mean.mul_(port.world / left)
        elif not self._uses_codec(port):  # nobody's: w_global stays
            w_global = self._slice(state.guard.anchor[kind], state.index)
            mean.copy_(w_global if len(mean) == len(w_global) else self._owner(port).of(w_global))

    def _uses_codec(self, port: Port) -> bool:
        """Return whether packets are sent: there is a codec, and more than one worker."""
        return self.codec is not None and port.world > 1

    def _is_eager(self, port: Port) -> bool:
        """Return whether the changes of others arrive a period later; a single worker has no others."""
        return self.eager and (port.world > 1 or port.elastic)

    @property
    def _in_place(self) -> bool:
        """True if fragments are exchanged in the memory of the weights."""
        return self.codec is None and not self.delay and not self.mix and not self.eager

    @property
    def _takes_mean(self) -> bool:
        """True if, without a codec, the next w_global is the mean as it is: no owner has to step."""
        return self.outer_lr == 1 and not self.outer_momentum and not self.eager

    def _owner(self, port: Port) -> EvenSlice:
        """Return the slice of a fragment that this worker owns; with a codec, every worker owns all.

        So it does where workers may be lost: a slice that one worker alone holds would be lost with it.
        """
        return WHOLE if self._uses_codec(port) or port.elastic else EvenSlice(port.rank, port.world)

    def _slice(self, flat: Tensor, index: int) -> Tensor:
        """Return the slice of a flat tensor that belongs to fragment `index`."""
        return EvenSlice(index, self.fragments).of(flat)

    def _sent(self, state: DiLoCoState, replica: Replica) -> list[Tensor]:
        """Return the memory in which the fragment in flight is sent and received."""
        parts = [self._slice(weight, state.index) for weight in replica.weights]
        if self._in_place:
            return parts
        if not state.send_buffers:  # the last fragment is the largest
            last = self.fragments - 1
            state.send_buffers = [torch.empty_like(self._slice(weight, last)) for weight in replica.weights]
        return [buffer[: len(part)] for buffer, part in zip(state.send_buffers, parts, strict=True)]

    def check_elastic(self, minimum: int) -> None:
        if self.guards:
            raise SettingError(
                "elastic=True with outlier_norm or outlier_cosine: who counts in a fragment in flight would "
                "change with the roster; leave the limits out"
            )
        check_elastic_codec(self.codec, minimum)

    async def on_roster_change(
        self, state: DiLoCoState, replica: Replica, port: Port, newcomer: bool
    ) -> None:
        if newcomer:
            state.own.forget_velocity()
            for reduction in state.reductions:
                reduction.forget_errors()

    async def drain(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Wait for the fragment in flight. Its own step merges it: evaluation must not change training."""
        await self._receive(state, port)
        for pending in state.buffers:
            await pending

    async def publish(self, state: DiLoCoState, replica: Replica, port: Port) -> list[Tensor]:
        if self.on_server:
            weights = [torch.empty_like(weight) for weight in replica.weights]
            await port.server.read(weights)
            return weights
        if not state.outer.w_global:  # before the first step
            return replica.weights
        owner, gathered = self._owner(port), []
        weights = [torch.zeros_like(weight) for weight in replica.weights]
        for weight, owned in zip(weights, state.outer.published, strict=True):
            for index, value in enumerate(owned):
                fragment = self._slice(weight, index)
                owner.of(fragment).copy_(value)
                if owner is not WHOLE and len(fragment):
                    gathered.append(port.all_gather(_slices(fragment, port)))
        for pending in gathered:
            await pending
        return weights


def _slices(fragment: Tensor, port: Port) -> list[Tensor]:
    """Cut a fragment into the slices of its owners."""
    return even_slices(fragment, port.world, grain_of(fragment.element_size()))


def _ends_with(slices: list[Tensor], fragment: Tensor) -> bool:
    """Return whether these are slices of the fragment's own memory: the last one is never empty."""
    last = slices[-1]
    return last.data_ptr() + last.nbytes == fragment.data_ptr() + fragment.nbytes


def _copy(arrived: Tensor | list[Tensor], into: Tensor | list[Tensor]) -> None:
    """Copy a result to its memory, where it is unless it comes from a checkpoint."""
    sources, targets = (each if isinstance(each, list) else [each] for each in (arrived, into))
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
