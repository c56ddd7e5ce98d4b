"""Auto: starts as BSP, measures, and goes over to LocalSGD where a model says that it pays. [ours]

    every step:        that of BSP, or that of LocalSGD(p)
    every `window`     the workers exchange, in the background,
    steps:                 C = max_i seconds of computing per step,   w = min_i seconds of waiting per step,
                           K = min_i seconds of the fastest exchange
                       and choose alike, a step later, by the seconds T that a model expects (model.py):
                           p* = the shortest period, BSP first, with T(p*) ≤ (1 + gain/2) min T
                           shorter than what runs: wanted;   longer: wanted if T(p*) ≤ (1 − gain) T(p)
    a change           needs the same wish in two windows in a row; after each return to BSP, in twice as many
                       before BSP is left again. So links that come and go do not make it change for ever
    BSP → LocalSGD     nothing travels: all workers hold the same weights and optimizer
    LocalSGD → BSP     w_i ← (1/N) Σ w_j, and so for the optimizer's state (core/optimizer_moments.py)

K/C says whether an exchange hides behind computing; the spread of speeds is in w. The learning rate stays as
the user's schedule has it. Only strategies that all loops and optimizers can change to at any step, and that
lose little accuracy, are candidates: LocalSGD with periods of 2, 4, … up to `longest`. OSP hides gradients
from the loop, and needs blocks of its own; long periods need learning rates of their own.

Where the model stays with BSP, this is BSP bit for bit: the numbers travel in the background, 40 bytes at a
time. So it is with `longest=1`, with an optimizer whose state cannot be averaged, for a sharded model, and
after an update was skipped: GradScalers of workers that step locally may come to different scales, with which
gradients cannot be averaged. Where that happens under LocalSGD, BSP does not come back.

Under elastic, a changed roster begins a new window, and deaths count in the model: a lost worker's local
steps are lost with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS

from offbeat.core.blocks import Block, Layout
from offbeat.core.fields import Number, Whole
from offbeat.core.optimizer_moments import is_shareable, share_state
from offbeat.core.port import Notice, Op, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.strategies.auto.meter import Meter
from offbeat.strategies.auto.model import BSP_PERIOD, Forecast, WindowSeconds, periods_up_to, wanted_period
from offbeat.strategies.bsp import BSP, BSPState
from offbeat.strategies.local_sgd import LocalSGD, LocalSGDState

AGREEING = 2  # windows in a row that must make the same choice


@dataclass
class AutoState:
    """The strategy that runs, measurements, and how often in a row another one was wanted."""

    bsp: BSPState
    period: int = BSP_PERIOD  # of LocalSGD, which runs; or BSP does
    local: LocalSGDState = field(default_factory=LocalSGDState)
    step: int = 0
    window: int = 0  # steps since the window began
    meter: Meter = field(default_factory=Meter)
    bsp_wait_s: float = 0.0  # w and K, when BSP was last measured
    bsp_exchange_s: float = 0.0
    wanted: int = BSP_PERIOD
    votes: int = 0  # windows in a row that want it
    patience: int = AGREEING  # windows that must agree before BSP is left
    # workers, as of the last change of the roster; 0 before the first step, and after a restart
    world: int = field(default=0, metadata={"saved": False})
    deaths: int = 0
    skipped: bool = False  # an update of this worker was skipped


@dataclass(frozen=True, kw_only=True)
class Auto(Strategy[AutoState]):
    """Strategy that is BSP, or LocalSGD while the measured network makes that worth it."""

    name = "auto"
    summary = "start as BSP; change to LocalSGD and back, by what is measured (experimental)"
    refused: ClassVar[dict[str, str]] = {
        "codec": "it changes between gradients and weights, whose stored errors do not fit each other"
    }

    window: Annotated[
        int, Whole("steps from one measurement of all workers to the next", of="steps", at_least=2)
    ] = 8
    gain: Annotated[
        float, Number("fraction of a step's time that a change must save", at_least=0, below=1)
    ] = 0.1
    longest: Annotated[
        int,
        Whole("longest period of LocalSGD, of 2, 4, 8 and so on; 1: BSP", of="steps", at_least=1),
    ] = 8

    def layout(self, model: nn.Module) -> Layout:
        """Return BSP's; what is measured decides, so virtual workers are computed one by one."""
        return replace(_BSP.layout(model), rowwise=False)

    def init(self, replica: Replica) -> AutoState:
        if any(isinstance(optimizer, LBFGS) for optimizer in replica.optimizer.optimizers):
            raise SettingError(
                "auto with LBFGS: it evaluates the loss as often as each worker's own loss asks for, so "
                "workers that change to BSP would be out of step; use BSP or LocalSGD"
            )
        return AutoState(_BSP.init(replica))

    # --- the step

    def ready(self, state: AutoState, replica: Replica, block: Block, port: Port) -> None:
        if state.period == BSP_PERIOD:
            _BSP.ready(state.bsp, replica, block, port)

    async def step(self, state: AutoState, replica: Replica, port: Port) -> None:
        state.world = state.world or port.world  # before an exchange of this step may find a death
        if state.period == BSP_PERIOD:
            await _BSP.step(state.bsp, replica, port)
        else:
            await _local_sgd(state.period).step(state.local, replica, port)
        state.step += 1
        state.skipped |= replica.inputs.skipped_updates > 0 or replica.optimizer.overflowed
        if port.world > 1 and self.longest > 1:
            await self._measure(state, replica, port)

    async def _measure(self, state: AutoState, replica: Replica, port: Port) -> None:
        """Measure the step; where a window has ended, exchange its numbers, and use them a step later."""
        exchanged = state.period == BSP_PERIOD or state.local.step % state.period == 0
        state.meter.add(port.usage(), exchanged)
        state.window += 1
        measured = await state.meter.receive()
        if measured is not None and (period := self.choose(state, measured, port)) != state.period:
            await self._change(state, replica, port, period, measured)
        elif state.window >= self.window and exchanged:
            fit = not replica.members.sharded and not state.skipped and is_shareable(replica)
            await state.meter.send(port, replica, fit)
            state.window = 0

    # --- the choice

    def choose(self, state: AutoState, measured: WindowSeconds, port: Port) -> int:
        """Return the period that the next step has, from numbers that are the same on all workers."""
        if not measured.known:  # right after a restart
            return state.period
        if state.period == BSP_PERIOD:
            state.bsp_wait_s, state.bsp_exchange_s = measured.wait_s, measured.exchange_s
        under_bsp = measured._replace(wait_s=state.bsp_wait_s, exchange_s=state.bsp_exchange_s)
        deaths = state.deaths / (state.step * port.world)
        forecast = Forecast.of(state.period, measured, under_bsp, deaths)
        periods = periods_up_to(self.longest)
        if not measured.fit:
            periods = periods[:1] if state.period == BSP_PERIOD else periods[1:]
        wanted = wanted_period(state.period, forecast, periods, self.gain)
        state.votes = state.votes + 1 if wanted == state.wanted else 1
        state.wanted = wanted
        needed = state.patience if state.period == BSP_PERIOD else AGREEING
        return wanted if state.votes >= needed else state.period

    async def _change(
        self, state: AutoState, replica: Replica, port: Port, period: int, measured: WindowSeconds
    ) -> None:
        before = state.period
        if before != BSP_PERIOD and period == BSP_PERIOD:
            flag = replica.weights[0].new_tensor([state.skipped], dtype=torch.float64)
            state.skipped = (await port.all_reduce(flag, Op.MAX)).item() > 0
            if state.skipped:
                period = before
            else:
                await replica.average(port)
                await share_state(replica, port)
                state.patience *= 2
        if port.rank == 0:
            port.record(Notice("changed", _reason(before, period, measured)))
        state.local = LocalSGDState(state.local.step % before if before else 0)  # steps since an average
        state.period = period
        state.votes = state.window = 0
        state.meter.restart()

    # --- between steps

    async def drain(self, state: AutoState, replica: Replica, port: Port) -> None:
        """Wait for the measurements in flight. The next step uses them."""
        await state.meter.drain()

    async def publish(self, state: AutoState, replica: Replica, port: Port) -> list[Tensor]:
        if state.period == BSP_PERIOD:
            return await _BSP.publish(state.bsp, replica, port)
        return await _local_sgd(state.period).publish(state.local, replica, port)

    async def on_roster_change(self, state: AutoState, replica: Replica, port: Port, newcomer: bool) -> None:
        state.deaths += max(0, state.world - port.world)
        state.world = port.world
        state.window = 0
        state.meter = Meter(pending=state.meter.pending)  # not even the last step counts: it took a recovery


_BSP = BSP()


@cache
def _local_sgd(period: int) -> LocalSGD:
    return LocalSGD(period=period)


def _reason(before: int, period: int, measured: WindowSeconds) -> str:
    """Return the change and its reason, in words."""

    def name(period: int) -> str:
        return "BSP" if period == BSP_PERIOD else f"LocalSGD(period={period})"

    if period == before:
        return f"{name(period)} stays: a worker skipped an update, so gradients may be scaled differently"
    ratio = measured.exchange_s / measured.compute_s
    spread = measured.compute_s / max(measured.fastest_s, 1e-9)
    return (
        f"{name(period)} instead of {name(before)}: an exchange takes {ratio:.2g} times as long as computing "
        f"(K/C), the slowest worker {spread:.2g} times as long as the fastest, "
        f"and a step {measured.step_s:.3g} s"
    )
