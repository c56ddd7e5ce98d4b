"""OSP: overlapped synchronization parallel (Chen et al., ICPP 2023).

Each step splits the blocks, alike on all workers, into important ones I and late ones U.

    1  g = ∇L(ŵ)                                    meanwhile ICS(t−1) travels
    2  ICS(t−1) ends:   ŵ[U] ← w[U] of t−1, stepped with ḡ and the learning rate of t−1
    3  RS, blocking:    ḡ[I]; the optimizer steps w[I]
    4  LGP:             ŵ[U] ← the step that w[U] would make with the local g; the optimizer's state untouched
    5  ICS starts:      ḡ[U], in the background

Every gradient is applied globally exactly once. Under plain SGD a worker's ŵ is off by −η(g_i − ḡ) on U,
which averages to zero over the workers; without LGP it would be off by a whole step.

From the paper's abstract: the two stages (RS, ICS) and local-gradient-based parameter correction (LGP). The
rest is ours:

    importance   mean |w·ḡ| of a block, from the last ḡ; the least important blocks go into U, as many as fit
    budget       bytes(U) ≤ B·T·N / (2(N−1)): what a ring moves while the slowest worker computes, and at most
                 80% of the model. T: seconds of computing per step, B: bytes sent per second of sending; of
                 each the maximum over the workers, smoothed. U is no larger than it needs to be: RS hides,
                 too, behind backward, so U is the smallest with which a step waits (almost) as little as
                 with a larger one. Where everything hides behind backward, U is empty
    agreement    the workers exchange T, B and importance every 8 steps, in the background: so all split alike
    growth       U starts empty and grows linearly over the first `growth` steps
    batch norm   its scales and shifts are always in I
    the loop     the user's loop changes gradients (unscaling, clipping by norm) in ḡ[I], the same on all
                 workers; the factor by which the norm changed is applied to U
    server       with `on="server"` the parameter server adds up the gradients of both stages and answers with
                 ḡ: workers step and predict as they do without a server
    overflow     an overflow in one worker's U is sent to all with RS, so that all GradScalers skip the step
    codec        for ICS alone, which then sends packets, block by block; I travels as it is

Where U is empty, OSP is BSP, bit for bit. A single worker has an empty U.

Under elastic, ḡ[I] and ḡ[U] are means over the workers that are left; an ICS in flight when a worker is lost
is sent again as it was. The stored errors of a lost worker are lost with it. B, T and importance are agreed
on anew with the next exchange of measurements. A newcomer gets the global weights, ḡ[U] as it arrived, the
split and the measurements; it has no stored errors. At least two workers must be left, since a single one has
no U.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor, nn

from offbeat.codecs import CodecSetting
from offbeat.codecs.all_reduce import MeanAllReduce, check_elastic_codec
from offbeat.core.blocks import Block, Layout, block_sizes, trainable_bytes
from offbeat.core.fields import Choice, FirstOf, Number, Whole
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port, Reducer, Usage
from offbeat.core.published import swap_values
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.core.weight_watch import is_looked_at
from offbeat.errors import SettingError
from offbeat.server.aggregation import ReduceOnly
from offbeat.server.half import ServerHalf
from offbeat.server.rule import Unbounded
from offbeat.strategies.osp.deferred import DeferredBlocks
from offbeat.strategies.osp.overflow import VisibleNorms, flag_overflow, propagate_overflow
from offbeat.strategies.osp.split import (
    UNKNOWN,
    batch_norm_parameters,
    contiguous_runs,
    hideable_bytes,
    importance_of,
    least_important,
    marked_bytes,
    waiting_s,
)
from offbeat.strategies.osp.throughput import ThroughputMeter

PLACES = ("collectives", "server")
CORRECTIONS = ("lgp", "ema-lgp", "none")
IMPORTANCES = ("weight-gradient", "gradient", "random")
MAX_LATE_FRACTION = 0.8  # of the model's bytes, under "auto"
PARTS = 32  # approximate number of blocks per model
SMALLEST_PART_BYTES = 256
BUDGETS_TRIED = 16
WAIT_TOLERANCE = 0.02  # of the time of computing: a larger U must save at least this much waiting
MEAN_DECAY = 0.9  # of the running mean of ḡ


@dataclass
class OSPState:
    """The split of the next step, exchanges in flight, and measurements for the splits to come."""

    importance: Tensor  # by block, as this worker last measured it
    agreed: list[float]  # importance by block, as all workers last agreed on it
    pinned: list[int]  # blocks that are never late
    late: list[int]  # U of the next step
    runs: list[list[int]]  # I of the next step, in the runs that travel together
    step: int = 0
    pending: list[Pending[Tensor]] = field(default_factory=list)  # RS, by run
    deferred: DeferredBlocks = field(default_factory=DeferredBlocks)  # ICS
    means: list[Tensor] = field(default_factory=list)  # by block: the running mean of ḡ
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)


@dataclass(frozen=True, kw_only=True)
class OSP(Strategy[OSPState]):
    """Strategy that averages important gradients at once, and the others during the next step."""

    name = "osp"
    summary = "average important gradients at once, the others behind the next step; predict meanwhile"

    codec: CodecSetting = None
    budget: Annotated[
        float | str,
        FirstOf(
            "fraction of the model that may be late; auto: as much as computation hides",
            kinds=(Choice(of=("auto",)), Number(noun="a fraction of the model", at_least=0, at_most=1)),
        ),
    ] = "auto"
    growth: Annotated[
        int, Whole("steps over which the late part grows to its budget", of="steps", at_least=0)
    ] = 100
    importance: Annotated[str, Choice("how blocks are ranked", of=IMPORTANCES)] = "weight-gradient"
    correction: Annotated[str, Choice("how weights of late blocks are predicted", of=CORRECTIONS)] = "lgp"
    mix: Annotated[float, Number("weight of the running mean under ema-lgp", at_least=0, at_most=1)] = 0.5
    on: Annotated[str, Choice("where gradients are added up", of=PLACES)] = "collectives"

    def check(self) -> None:
        if self.codec is not None and self.on == "server":
            raise SettingError(f'codec={self.codec}: not with on="server", which cannot add up packets')

    def server_half(self) -> ServerHalf | None:
        return ServerHalf(rule=Unbounded(), aggregation=ReduceOnly) if self.on == "server" else None

    def _reducer(self, port: Port) -> Reducer:
        """Return the reducer of gradients: the server or the port."""
        return port.server if self.on == "server" else port

    def _usage(self, port: Port) -> Usage:
        """Return the port's usage; with a server, count bytes as a ring would have sent them."""
        usage = port.usage()
        if self.on == "server":
            return usage._replace(nbytes=2 * usage.server_reduced * (port.world - 1) // port.world)
        return usage

    def check_elastic(self, minimum: int) -> None:
        if minimum < 2 and self.budget != 0:
            raise SettingError(
                "elastic=True: a single worker has no late blocks, so with osp minimum must be 2 or more"
            )
        check_elastic_codec(self.codec, minimum, single_phase=True)

    async def on_roster_change(self, state: OSPState, replica: Replica, port: Port, newcomer: bool) -> None:
        if newcomer:
            state.deferred.reduction.forget_errors()

    # --- the layout: small blocks, since a block is late as a whole or not at all

    def layout(self, model: nn.Module) -> Layout:
        alone = self.on == "server"  # which adds up the gradients of a single worker, too
        if self.budget == 0:
            return Layout.default(model, gradients=True, gathers_alone=alone)
        part = max(trainable_bytes(model) // PARTS, SMALLEST_PART_BYTES)
        isolated = batch_norm_parameters(model)
        return Layout(part, part, isolated, gradients=True, gathers_alone=alone, keeps_edits=False)

    def init(self, replica: Replica) -> OSPState:
        unknown = [UNKNOWN] * len(replica.blocks)
        importance = replica.weights[0].new_tensor(unknown, dtype=torch.float64)
        isolated = self.layout(replica.model).isolate
        pinned = [block.index for block in replica.blocks if block.params[0] in isolated]
        state = OSPState(importance, unknown, pinned, [], self._runs(replica, []))
        state.deferred.reduction = MeanAllReduce.of_blocks(
            replica.blocks, self.codec, Lane.BACK, single_phase=True
        )
        return state

    @staticmethod
    def _runs(replica: Replica, late: list[int]) -> list[list[int]]:
        return contiguous_runs(
            replica.blocks, late, *block_sizes(sum(flat.nbytes for flat in replica.weights))
        )

    # --- the step

    def ready(self, state: OSPState, replica: Replica, block: Block, port: Port) -> None:
        sent, reducer = len(state.pending), self._reducer(port)
        if block is replica.blocks[-1]:
            if state.late:
                flag_overflow([replica.blocks[i] for i in state.late], replica.blocks[state.runs[-1][-1]])
            self._send(state, replica, reducer)
            replica.buffers.start(port, reducer)
        elif sent < len(state.runs) - 1 and state.runs[sent][-1] == block.index:
            self._send(state, replica, reducer)

    @staticmethod
    def _send(state: OSPState, replica: Replica, reducer: Reducer) -> None:
        run = [replica.blocks[i].marked for i in state.runs[len(state.pending)]]
        whole = run[0].as_strided((sum(part.numel() for part in run),), (1,))
        state.pending.append(reducer.all_reduce(whole))

    async def step(self, state: OSPState, replica: Replica, port: Port) -> None:
        pending, state.pending = state.pending, []
        late = [replica.blocks[i] for i in state.late]
        important = [replica.blocks[i] for run in state.runs for i in run]
        await self._apply_deferred(state, replica, port)
        for reduction in pending:
            await reduction
        for block in important:
            block.hand_out()
        if late:
            propagate_overflow(important, important[-1])
        await replica.buffers.finish()
        absent = [block.take_absent() for block in late]
        splits = port.world > 1 and self.budget != 0
        looks = splits and is_looked_at(state.step)  # also while nothing is late: it will be
        norms = VisibleNorms(replica, important) if late or looks else None
        usage = self._usage(port)
        look = norms.look if norms else None
        happened = await replica.update(set(important) if late else None, look)
        state.step += 1
        replica.optimizer.remember_settings()
        if splits:
            replica.optimizer.check_separable(self.name)
            agreed = await state.meter.read(self._reducer(port), usage, state.importance, replica.members)
            state.agreed = agreed or state.agreed
            self._split(state, replica, port, agreed is not None)
        if not splits or not happened or replica.optimizer.overflowed:
            return
        self._allocate(state, replica)
        for block in important:
            self._record(state, block, block.grad)
        if norms is not None and looks:
            norms.check_scaled()
        if norms is not None and late:
            factor = await norms.factor()
            self._predict(state, replica, late, absent, factor)
            rates = replica.optimizer.learning_rates
            state.deferred.send(port, self._reducer(port), late, absent, rates)
            replica.optimizer.hold_state()

    def _predict(
        self, state: OSPState, replica: Replica, late: list[Block], absent: list[list[int]], factor: Tensor
    ) -> None:
        """Predict the late blocks' weights (LGP) with the gradients that will travel."""
        guesses = state.deferred.pack(late, factor)
        state.deferred.save_weights(late)
        if self.correction == "none":
            return
        missing = {b.params[i] for b, positions in zip(late, absent, strict=True) for i in positions}
        if self.correction == "ema-lgp":
            for block, guess in zip(late, guesses, strict=True):
                guess.lerp_(state.means[block.index], self.mix)
        replica.optimizer.predict(late, guesses, replica.optimizer.learning_rates, missing)
        if self.correction == "ema-lgp":  # what travels is the gradient, not the guess
            state.deferred.pack(late, factor)

    async def _apply_deferred(self, state: OSPState, replica: Replica, port: Port) -> None:
        """Replace the late blocks' predicted weights by their global weights, stepped."""
        await state.deferred.receive(port, replica)
        if state.deferred.blocks:  # a step of before, which the state must not have seen
            replica.optimizer.check_held_state(self.name)
        for block, grad in state.deferred.apply(replica, replica.optimizer.step):
            self._record(state, block, grad)
        state.deferred.clear()

    async def drain(self, state: OSPState, replica: Replica, port: Port) -> None:
        """Wait for the late blocks. The next step applies them: evaluation must not change training."""
        await state.deferred.receive(port, replica)
        for pending in state.meter.pending:
            await pending

    async def publish(self, state: OSPState, replica: Replica, port: Port) -> list[Tensor]:
        """Return the global weights; those of blocks that are still in flight as of the step before."""
        shown = [weight.clone() for weight in replica.weights]
        if state.deferred.in_flight:
            state.deferred.restore(replica)
        else:
            state.deferred.apply(replica, replica.optimizer.predict)
        for own, copy in zip(replica.weights, shown, strict=True):
            swap_values(own, copy)
        return shown

    # --- the split

    def _split(self, state: OSPState, replica: Replica, port: Port, measured: bool = True) -> None:
        """Choose U and I of the next step. `measured`: the workers just agreed on new measurements."""
        growing = state.step <= self.growth
        if self.importance == "random":
            draw = torch.rand(len(replica.blocks), generator=torch.Generator().manual_seed(state.step))
            state.agreed = draw.tolist()
        elif not (measured or growing):
            return
        nbytes = [marked_bytes(block) for block in replica.blocks]
        allowed = self._max_fraction * sum(nbytes)
        if growing:
            allowed *= state.step / self.growth
        if self.budget == "auto":
            late = self._smallest_late(state, replica, nbytes, allowed, port.world)
        else:
            late = least_important(state.agreed, nbytes, allowed, state.pinned)
        if late != state.late:
            state.late, state.runs = late, self._runs(replica, late)

    def _smallest_late(
        self, state: OSPState, replica: Replica, nbytes: list[int], allowed: float, world: int
    ) -> list[int]:
        """Return the smallest U with which a step waits (almost) as little as with any larger one."""
        compute_s, ratio = state.meter.compute_s, self._codec_ratio(world)
        bytes_per_s = hideable_bytes(1.0, state.meter.bytes_per_s, world)
        if not compute_s or not bytes_per_s:
            return []
        allowed = min(allowed, compute_s * bytes_per_s / ratio)
        lates, waits = [], []
        for number in range(BUDGETS_TRIED + 1):
            budget = allowed * number / BUDGETS_TRIED
            late = least_important(state.agreed, nbytes, budget, state.pinned)
            sent = self._runs(replica, late)
            lates.append(late)
            waits.append(waiting_s(sent, late, nbytes, compute_s, bytes_per_s, ratio))
        enough = min(waits) + WAIT_TOLERANCE * compute_s
        return next(late for late, wait in zip(lates, waits, strict=True) if wait <= enough)

    def _codec_ratio(self, world: int) -> float:
        """Return the time to send a block by the codec, relative to a ring all-reduce without a codec."""
        if self.codec is None or not self.codec.splittable:
            return 1.0
        ratio = self.codec.wire_ratio
        return ratio if self.codec.summable else ratio * world / 2  # an all-gather sends packets to all

    @property
    def _max_fraction(self) -> float:
        return MAX_LATE_FRACTION if self.budget == "auto" else float(self.budget)

    def _allocate(self, state: OSPState, replica: Replica) -> None:
        budget = self._max_fraction * sum(marked_bytes(block) for block in replica.blocks)
        state.deferred.allocate(replica.blocks, budget)
        if self.correction == "ema-lgp" and not state.means:
            state.means = [torch.zeros_like(block.weight) for block in replica.blocks]

    def _record(self, state: OSPState, block: Block, grad: Tensor) -> None:
        """Update a block's importance and running mean with its averaged gradient, just applied."""
        if self.importance != "random":
            scratch = state.deferred.scratch(block)
            state.importance[block.index] = importance_of(self.importance, block, grad, scratch)
        if self.correction == "ema-lgp":
            state.means[block.index].lerp_(grad, max(1 - MEAN_DECAY, 1 / state.step))
