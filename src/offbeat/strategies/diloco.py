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

The published model is w̄, which all workers hold: evaluating it sends nothing. It is the weighted mean of
w_global after each merge, in which a merge has β times the weight of the next; with β = 0 it is w_global.

From the papers: all of the above but w̄; η = 0.7, μ = 0.9.

Ours:
- w̄. Momentum carries w_global past its target and back; a mean over some merges reaches the target sooner.
  It is off by default.
- Fragments are even slices of the flat weights, in backward order, that may cut through a parameter: the
  outer optimizer is elementwise, and so every exchange has the same size.
- w_i travels, and not w_global − w_i. The result is the same, since w_global is the same everywhere, and with
  η = 1 and μ = 0 w_global becomes the mean to the bit. So P = 1, τ = 0, α = 0 is then LocalSGD, bit for bit,
  and with H = 1 under plain SGD it is BSP.
- Batch norm's statistics are averaged with the last fragment, once in H steps, and have the same delay.
- The inner optimizer's state stays local.
- With a codec, w_i − w_global travels, fragment by fragment, and the mean of the decoded packets stands for
  −Δ. Error feedback has a memory for each fragment. A codec with two phases starts the second one halfway
  through the delay.

Under elastic, Δ is over the workers that are left; a fragment in flight when a worker is lost is sent again
as it was. All workers hold the whole outer state (w_global, v, w̄), so a lost worker takes nothing of it
along but its local steps and stored errors. A newcomer gets the outer state and the clock, and starts from
another worker's w_i and inner optimizer. (If the outer state were cut over the workers, a lost worker's slice
would have to be kept by a second worker, or rebuilt here: w_global from w̄ or from the w_i, v from zero.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from offbeat.codecs import Codec, CodecField
from offbeat.codecs.all_reduce import MeanAllReduce, check_elastic_codec
from offbeat.core.fields import Number, Whole
from offbeat.core.partition import EvenSlice
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError


@dataclass
class DiLoCoState:
    """The outer optimizer, and the fragment in flight. Lists of tensors have one per dtype and device."""

    step: int = 0
    w_global: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    averaged: list[Tensor] = field(default_factory=list)  # w̄, if it is not w_global
    reductions: list[MeanAllReduce] = field(default_factory=list)  # by fragment
    index: int = 0  # of the fragment in flight
    means: list[Tensor] = field(default_factory=list)  # of that fragment, once they have arrived
    buffers: list[Pending[Tensor]] = field(default_factory=list)  # batch norm's statistics, in flight

    def __post_init__(self) -> None:
        self.send_buffers: list[Tensor] = []  # for any fragment; not saved in checkpoints


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy[DiLoCoState]):
    """Strategy of local steps, in which an outer optimizer steps the global weights every `period` steps."""

    name = "diloco"
    summary = "step locally; an outer optimizer steps the global weights every `period` steps, in fragments"

    codec: Annotated[Codec | None, CodecField(splittable="fragments cut through the matrices")] = None
    period: Annotated[int, Whole("steps from one merge of a fragment to its next", at_least=1)] = 32
    outer_lr: Annotated[
        float, Number("learning rate of the outer optimizer", noun="a finite number", above=0)
    ] = 0.7
    outer_momentum: Annotated[
        float, Number("Nesterov momentum of the outer optimizer", at_least=0, below=1)
    ] = 0.9
    fragments: Annotated[int, Whole("fragments of the model, merged one after the other", at_least=1)] = 1
    delay: Annotated[int, Whole("steps of computation that overlap a fragment's exchange", at_least=0)] = 0
    mix: Annotated[
        float, Number("fraction of a worker's own weights that a merge keeps", at_least=0, below=1)
    ] = 0.0
    average: Annotated[
        float, Number("weight of a merge relative to the next in the published mean", at_least=0, below=1)
    ] = 0.0

    def check(self) -> None:
        if self.period % self.fragments:
            allowed = [str(n) for n in range(1, self.period + 1) if self.period % n == 0]
            raise SettingError(
                f"fragments={self.fragments}: must divide period={self.period}: {', '.join(allowed)}"
            )
        if self.delay >= self.stride:
            raise SettingError(
                f"delay={self.delay}: from 0 to {self.stride - 1}, since one of {self.fragments} "
                f"fragments is merged every {self.stride} steps"
            )

    @property
    def stride(self) -> int:
        """The number of steps from one fragment to the next."""
        return self.period // self.fragments

    def init(self, replica: Replica) -> DiLoCoState:
        slices = [[self._slice(w, index) for w in replica.weights] for index in range(self.fragments)]
        return DiLoCoState(
            reductions=[MeanAllReduce.of_tensors(part, self.codec, Lane.BACK) for part in slices]
        )

    async def step(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        if not state.w_global:  # here, since all workers have the same weights by now
            state.w_global = [weight.clone() for weight in replica.weights]
            if self.outer_momentum:
                state.velocity = [weight.new_zeros(weight.shape) for weight in replica.weights]
            if self.average:
                state.averaged = [weight.clone() for weight in replica.weights]
        await replica.update()
        state.step += 1
        number, remainder = divmod(state.step + self.delay, self.stride)
        if remainder == 0:
            state.index = (number - 1) % self.fragments
            self._send(state, replica, port)
        if state.step % self.stride == 0:
            await self._receive(state, port)
            await self._merge(state, replica, port)
        elif (state.step + self.delay // 2) % self.stride == 0:  # so that two phases hide behind computation
            await state.reductions[state.index].exchange(port)

    def _send(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        if not state.send_buffers:  # the last fragment is the largest
            last = self.fragments - 1
            state.send_buffers = [self._slice(weight, last).clone() for weight in replica.weights]
        reduction = state.reductions[state.index]
        for i, weight in enumerate(replica.weights):
            own = self._slice(weight, state.index)
            sent = state.send_buffers[i][: own.numel()]
            if reduction.uses_codec(port):
                torch.sub(own, self._slice(state.w_global[i], state.index), out=sent)
            else:
                sent.copy_(own)
            reduction.start(sent, port, i)
        if state.index == self.fragments - 1:
            state.buffers = replica.buffers.send(port, Lane.BACK)

    async def _receive(self, state: DiLoCoState, port: Port) -> None:
        """Wait for the fragment in flight: the mean weights; with a codec −Δ, decoded."""
        if state.reductions[state.index].pending:
            state.means = await state.reductions[state.index].finish(port)

    async def _merge(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        decoded = state.reductions[state.index].uses_codec(port)
        for i, (weight, mean) in enumerate(zip(replica.weights, state.means, strict=True)):
            own, w_global = (self._slice(flat, state.index) for flat in (weight, state.w_global[i]))
            if decoded or self.outer_momentum:
                change = mean if decoded else mean.sub_(w_global)  # −Δ
                w_global.add_(change, alpha=self.outer_lr)
                if self.outer_momentum:
                    velocity = self._slice(state.velocity[i], state.index)
                    torch.add(change, velocity, alpha=self.outer_momentum, out=velocity)
                    w_global.add_(velocity, alpha=self.outer_lr * self.outer_momentum)
            else:
                w_global.lerp_(mean, self.outer_lr)
            own.lerp_(w_global, 1 - self.mix)
            if self.average:
                merges = (state.step // self.stride - 1) // self.fragments + 1  # of this fragment
                latest = (1 - self.average) / (1 - self.average**merges)
                self._slice(state.averaged[i], state.index).lerp_(w_global, latest)
        await replica.buffers.receive(state.buffers)
        state.means, state.buffers = [], []

    def _slice(self, flat: Tensor, index: int) -> Tensor:
        """Return the slice of a flat tensor that belongs to fragment `index`."""
        return EvenSlice(index, self.fragments).of(flat)

    def check_elastic(self, minimum: int) -> None:
        check_elastic_codec(self.codec, minimum)

    async def on_roster_change(
        self, state: DiLoCoState, replica: Replica, port: Port, newcomer: bool
    ) -> None:
        if newcomer:
            for reduction in state.reductions:
                reduction.forget_errors()

    async def drain(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Wait for the fragment in flight. Its own step merges it: evaluation must not change training."""
        await self._receive(state, port)
        for pending in state.buffers:
            await pending

    async def publish(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        published = state.averaged or state.w_global  # neither exists before the first step
        for weight, value in zip(replica.weights, published, strict=bool(published)):
            weight.copy_(value)
