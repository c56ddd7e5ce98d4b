"""DiLoCo: local steps, and an outer optimizer for what they come to; in fragments, behind computation.

    every step:           w_i ← the optimizer's step with g_i
    every H/P steps, t:   the next of P fragments of the model is merged. On it,
        Δ ← w_global − (1/N) Σ w_j       the outer gradient, of the w_j after step t−τ; sent from then on
        v ← μ v + Δ                      Nesterov momentum
        w_global ← w_global − η (Δ + μ v)
        w_i ← (1−α) w_global + α w_i
        w̄ ← w̄ + (1−β)/(1−βᵏ) (w_global − w̄)     what is published; no worker trains on it

H is `period`, P `fragments`, τ `delay`, η `outer_lr`, μ `outer_momentum`, α `mix`, β `average`; this is the
fragment's k-th turn, which comes once in H steps. P = 1 and τ = 0 is plain DiLoCo; with P > 1 fragments are
streamed, and with τ > 0 what travels has τ steps of computation to hide behind. τ < H/P, so one fragment at a
time is under way.

The published model is w̄, which all workers know: evaluating it sends nothing. It is the mean of what w_global
was after each turn, every one counting β times the next; with β = 0, w_global.

From the papers: all of the above but w̄, η = 0.7, μ = 0.9. Ours [ours]: momentum carries w_global past where
it is going and back, and a mean over some turns is there sooner; none, unless asked for. Fragments are even
slices of the flat weights, in backward order, that may cut through a parameter: the outer optimizer steps
every element by itself, and so the network carries the same every time. What travels is w_i and not
w_global − w_i: w_global is the same everywhere, so that comes to the same; and with η = 1 and μ = 0 w_global
becomes the very mean. So P = 1, τ = 0, α = 0 is then LocalSGD, bit for bit, and with H = 1 under plain SGD it
is BSP. Batch norm's statistics are averaged with the last fragment, once in H steps, and are as old as it.
The inner optimizer's state stays local.

With a codec what travels is w_i − w_global, fragment by fragment, and the mean of what it decodes to stands
for −Δ. Error feedback remembers each fragment's own. Packets that travel two ways begin the second one
halfway through the delay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs import Codec, Stream, exchange_all, finish_all
from offbeat.core.blocks import EvenSlice
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError


@dataclass
class DiLoCoState:
    """The outer optimizer, and what is under way. Tensors are one for each dtype and device."""

    step: int = 0
    w_global: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    averaged: list[Tensor] = field(default_factory=list)  # what w_global was in the mean, if asked for
    index: int = 0  # of the fragment that is under way
    fragment: list[Pending[Any]] = field(default_factory=list)  # on its way to becoming the mean
    turned: bool = field(default=False, metadata={"saved": False})  # with a codec: on its second way
    landed: bool = False  # it is: with a codec, decoded
    wires: list[list[Stream]] = field(default_factory=list)  # with a codec: by fragment, one for each tensor
    statistics: list[Pending[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.luggage: list[Tensor] = []  # what fragments travel in, each in its turn; no part of a checkpoint


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy[DiLoCoState]):
    """Step locally; every `period` steps an outer optimizer steps the global weights."""

    name = "diloco"
    no_codec = ""
    summary = "step locally; an outer optimizer steps the global weights every `period` steps, in fragments"

    period: int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    average: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec is not None and not self.codec.splittable:
            raise SettingError(
                f"codec={self.codec}: diloco takes none that needs whole matrices: fragments cut through them"
            )
        for name, least in (("period", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(f"{name}={value!r}: a whole number, at least {least}")
        if self.period % self.fragments:
            allowed = [str(n) for n in range(1, self.period + 1) if self.period % n == 0]
            raise SettingError(
                f"fragments={self.fragments}: must divide period={self.period}: {', '.join(allowed)}"
            )
        if self.delay >= self.stride:
            raise SettingError(
                f"delay={self.delay}: from 0 to {self.stride - 1}, as the next of {self.fragments} fragments "
                f"comes every {self.stride} steps"
            )
        if not _is_number(self.outer_lr) or not 0 < self.outer_lr < math.inf:
            raise SettingError(f"outer_lr={self.outer_lr!r}: a finite number above 0")
        for name in ("outer_momentum", "mix", "average"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < 1:
                raise SettingError(f"{name}={value!r}: a number from 0 to below 1")

    @property
    def stride(self) -> int:
        """Steps from one fragment to the next."""
        return self.period // self.fragments

    def init(self, replica: Replica) -> DiLoCoState:
        state = DiLoCoState()
        if self.codec is not None:
            state.wires = [
                [self.codec.stream(self._part(weight, index), lane=Lane.BACK) for weight in replica.weights]
                for index in range(self.fragments)
            ]
        return state

    async def step(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        if not state.w_global:  # now, as all workers have the same weights by now
            state.w_global = [weight.clone() for weight in replica.weights]
            if self.outer_momentum:
                state.velocity = [weight.new_zeros(weight.shape) for weight in replica.weights]
            if self.average:
                state.averaged = [weight.clone() for weight in replica.weights]
        await replica.update()
        state.step += 1
        turn, left = divmod(state.step + self.delay, self.stride)
        if left == 0:
            state.index = (turn - 1) % self.fragments
            self._send(state, replica, port)
        if state.step % self.stride == 0:
            await self._land(state, port)
            await self._merge(state, replica, port)
        elif (state.step + self.delay // 2) % self.stride == 0:
            await self._turn(state, port)

    def _send(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        if not state.luggage:  # the last part is the largest
            state.luggage = [self._part(weight, self.fragments - 1).clone() for weight in replica.weights]
        for i, weight in enumerate(replica.weights):
            part = self._part(weight, state.index)
            sent = state.luggage[i][: part.numel()]
            if codec := self._codec(port):
                torch.sub(part, self._part(state.w_global[i], state.index), out=sent)
                state.fragment.append(codec.start(state.wires[state.index][i], sent, port))
            else:
                sent.copy_(part)
                state.fragment.append(
                    port.all_reduce(sent, lane=Lane.BACK) if sent.numel() else Arrived(sent)
                )
        if state.index == self.fragments - 1:
            state.statistics = replica.buffers.send(port, Lane.BACK)

    async def _turn(self, state: DiLoCoState, port: Port) -> None:
        """With a codec: halfway through the delay, so that both ways of packets that have two are hidden."""
        codec = self._codec(port)
        if codec is None or not state.fragment or state.turned or state.landed:
            return
        wires, means = state.wires[state.index], self._means(state)
        state.fragment = await exchange_all(codec, wires, means, port, state.fragment)
        state.turned = True

    async def _land(self, state: DiLoCoState, port: Port) -> None:
        """Wait until the fragment that is under way has come: the mean; with a codec −Δ, decoded."""
        if not state.fragment or state.landed:
            return
        if codec := self._codec(port):
            await self._turn(state, port)
            means = self._means(state)
            await finish_all(codec, state.wires[state.index], means, port, state.fragment)
            state.fragment = [Arrived(mean) for mean in means]
        else:
            state.fragment = [Arrived(await arriving) for arriving in state.fragment]
        state.landed = True

    async def _merge(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        for i, (weight, arriving) in enumerate(zip(replica.weights, state.fragment, strict=True)):
            own, w_global = (self._part(flat, state.index) for flat in (weight, state.w_global[i]))
            arrived, coded = await arriving, self._codec(port) is not None
            if coded or self.outer_momentum:
                ahead = arrived if coded else arrived.sub_(w_global)  # −Δ
                w_global.add_(ahead, alpha=self.outer_lr)
                if self.outer_momentum:
                    velocity = self._part(state.velocity[i], state.index)
                    torch.add(ahead, velocity, alpha=self.outer_momentum, out=velocity)
                    w_global.add_(velocity, alpha=self.outer_lr * self.outer_momentum)
            else:
                w_global.lerp_(arrived, self.outer_lr)
            own.lerp_(w_global, 1 - self.mix)
            if self.average:
                turns = (state.step // self.stride - 1) // self.fragments + 1  # of this fragment
                latest = (1 - self.average) / (1 - self.average**turns)
                self._part(state.averaged[i], state.index).lerp_(w_global, latest)
        await replica.buffers.receive(state.statistics)
        state.fragment, state.statistics, state.turned, state.landed = [], [], False, False

    def _codec(self, port: Port) -> Codec | None:
        """None also for a worker alone, who sends nothing."""
        return self.codec if port.world > 1 else None

    def _means(self, state: DiLoCoState) -> list[Tensor]:
        """What the fragment that is under way travels in."""
        sizes = [self._part(w_global, state.index).numel() for w_global in state.w_global]
        return [part[:size] for part, size in zip(state.luggage, sizes, strict=True)]

    def _part(self, flat: Tensor, index: int) -> Tensor:
        """A fragment's slice of a flat tensor."""
        return EvenSlice(index, self.fragments).of(flat)

    async def drain(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        """Wait, but merge in its own step: looking at a model must not change its training."""
        await self._land(state, port)
        for pending in state.statistics:
            await pending

    async def publish(self, state: DiLoCoState, replica: Replica, port: Port) -> None:
        published = state.averaged or state.w_global  # neither, before the first step
        for weight, shown in zip(replica.weights, published, strict=bool(published)):
            weight.copy_(shown)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
