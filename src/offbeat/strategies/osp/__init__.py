"""OSP: overlapped synchronization parallel (Chen et al., ICPP 2023).

Each step splits the blocks, alike on all workers, into important ones I and late ones U.

    1  g = ∇L(ŵ)                                    meanwhile ICS(t−1) travels
    2  ICS(t−1) is in:  ŵ[U] ← w[U] of t−1, stepped with ḡ and the learning rate of t−1
    3  RS, blocking:    ḡ[I]; the optimizer steps w[I]
    4  LGP:             ŵ[U] ← the step that w[U] would make with the local g; the optimizer's state untouched
    5  ICS starts:      ḡ[U], in the background

Every gradient is applied globally exactly once. Under plain SGD a worker's ŵ is off by −η(g_i − ḡ) on U,
which averages to zero over the workers; without LGP it would be off by a whole step.

From the paper's abstract: the two stages (RS, ICS) and local-gradient-based parameter correction (LGP). All
of the rest is ours [ours]:

    importance   mean |w·ḡ| of a block, from the last ḡ; the least important blocks go into U, as many as fit
    budget       bytes(U) ≤ B·T·N / (2(N−1)): what a ring moves while the slowest worker computes, and at most
                 80% of all. T: seconds of computing a step, B: bytes sent by seconds of sending; of each the
                 maximum over the workers. New ones are believed by half. No more is late than need be: RS
                 hides too, behind backward, so U is the smallest that leaves (almost) no more to wait for
                 than a larger one would; where all hides behind backward, it is empty
    agreement    both are asked of all workers, every 8 steps, in the background: so all split alike
    growth       U starts empty and grows linearly over the first steps
    batch norm   its scales and shifts are always in I
    the loop     what it does to gradients (unscaling, clipping by norm) it does to ḡ[I], of which all workers
                 hold the same; the factor by which the norm of that changed is put on U
    server       with `on="server"` the parameter server adds up the gradients of both stages and answers with
                 ḡ: workers step and predict as they do without one
    overflow     in one worker's U it is told to all with RS, so that all GradScalers skip the step
    codec        for ICS alone, which then sends packets, a block at a time; what is in I travels as it is

Where U is empty this is BSP, bit for bit; so it is in a world of one, where nothing need be hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block, Layout, block_sizes, trainable_bytes
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port, Reducer, Usage
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.server.aggregation import ReduceOnly
from offbeat.server.half import ServerHalf
from offbeat.server.rule import Unbounded
from offbeat.strategies.osp.deferred import DeferredBlocks
from offbeat.strategies.osp.overflow import clip_factor, flag_overflow, norm_of, propagate_overflow
from offbeat.strategies.osp.split import (
    UNKNOWN,
    batch_norm_parameters,
    hideable_bytes,
    importance_of,
    least_important,
    marked_bytes,
    runs,
    waiting_s,
)
from offbeat.strategies.osp.throughput import ThroughputMeter

PLACES = ("collectives", "server")
CORRECTIONS = ("lgp", "ema-lgp", "none")
IMPORTANCES = ("weight-gradient", "gradient", "random")
LARGEST = 0.8  # of the model's bytes, under "auto"
PARTS = 32  # blocks, about, that a model is cut into
SMALLEST_PART_BYTES = 256
TRIES = 16  # budgets that are weighed, up to the largest
SLIGHT = 0.02  # of computing: waiting that nothing is put off for
MEMORY = 0.9  # of the running mean of ḡ


@dataclass
class OSPState:
    importance: Tensor  # by block, as this worker has last seen it
    agreed: list[float]  # as all have
    pinned: list[int]  # blocks that are never late
    late: list[int]  # U of the step to come
    runs: list[list[int]]  # I of the step to come, as it is sent
    step: int = 0
    flying: list[Pending[Tensor]] = field(default_factory=list)  # RS
    behind: DeferredBlocks = field(default_factory=DeferredBlocks)  # ICS
    means: list[Tensor] = field(default_factory=list)  # by block: the running mean of ḡ
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)


@dataclass(frozen=True, kw_only=True)
class OSP(Strategy[OSPState]):
    """Average the important gradients at once, and the others behind the next step's computation."""

    name = "osp"
    no_codec = ""
    summary = "average important gradients at once, the others behind the next step; predict meanwhile"

    budget: float | str = "auto"
    growth: int = 100
    importance: str = "weight-gradient"
    correction: str = "lgp"
    mix: float = 0.5
    on: str = "collectives"

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.budget, int | float) and not isinstance(self.budget, bool)
        if self.budget != "auto" and not (number and 0 <= float(self.budget) <= 1):
            raise SettingError(f'budget={self.budget!r}: "auto", or a fraction of the model from 0 to 1')
        if isinstance(self.growth, bool) or not isinstance(self.growth, int) or self.growth < 0:
            raise SettingError(f"growth={self.growth!r}: a whole number of steps, 0 or more")
        if self.importance not in IMPORTANCES:
            raise SettingError(f"importance={self.importance!r}: choose one of {', '.join(IMPORTANCES)}")
        if self.correction not in CORRECTIONS:
            raise SettingError(f"correction={self.correction!r}: choose one of {', '.join(CORRECTIONS)}")
        if not isinstance(self.mix, int | float) or not 0 <= self.mix <= 1:
            raise SettingError(f"mix={self.mix!r}: a number from 0 to 1")
        if self.on not in PLACES:
            raise SettingError(f"on={self.on!r}: choose one of {', '.join(PLACES)}")
        if self.codec is not None and self.on == "server":
            raise SettingError(f'codec={self.codec}: not with on="server", which adds up what it is brought')

    def server_half(self) -> ServerHalf | None:
        return ServerHalf(rule=Unbounded(), aggregation=ReduceOnly) if self.on == "server" else None

    def _reducer(self, port: Port) -> Reducer:
        """Return what averages the gradients."""
        return port.server if self.on == "server" else port

    def _usage(self, port: Port) -> Usage:
        """Return the port's usage; with a server, count bytes as a ring would have sent them."""
        usage = port.usage()
        if self.on == "server":
            return usage._replace(nbytes=2 * usage.server_reduced * (port.world - 1) // port.world)
        return usage

    # --- the layout: small blocks, since whole ones come late or do not

    def layout(self, model: nn.Module) -> Layout:
        if self.budget == 0:
            return Layout.default(model, gradients=True)
        part = max(trainable_bytes(model) // PARTS, SMALLEST_PART_BYTES)
        return Layout(part, part, batch_norm_parameters(model), gradients=True)

    def init(self, replica: Replica) -> OSPState:
        unknown = [UNKNOWN] * len(replica.blocks)
        importance = replica.weights[0].new_tensor(unknown, dtype=torch.float64)
        isolated = self.layout(replica.model).isolate
        pinned = [block.index for block in replica.blocks if block.params[0] in isolated]
        state = OSPState(importance, unknown, pinned, [], self._runs(replica, []))
        if self.codec is not None:
            blocks = replica.blocks
            state.behind.wires = [
                self.codec.stream(b.weight, b.matrices(), Lane.BACK, one_way=True) for b in blocks
            ]
        return state

    @staticmethod
    def _runs(replica: Replica, late: list[int]) -> list[list[int]]:
        return runs(replica.blocks, late, *block_sizes(sum(flat.nbytes for flat in replica.weights)))

    # --- the step

    def ready(self, state: OSPState, replica: Replica, block: Block, port: Port) -> None:
        sent, reducer = len(state.flying), self._reducer(port)
        if block is replica.blocks[-1]:
            if state.late:
                flag_overflow([replica.blocks[i] for i in state.late], replica.blocks[state.runs[-1][-1]])
            self._send(state, replica, reducer)
            replica.buffers.start(port, reducer)
        elif sent < len(state.runs) - 1 and state.runs[sent][-1] == block.index:
            self._send(state, replica, reducer)

    @staticmethod
    def _send(state: OSPState, replica: Replica, reducer: Reducer) -> None:
        run = [replica.blocks[i].marked for i in state.runs[len(state.flying)]]
        whole = run[0].as_strided((sum(part.numel() for part in run),), (1,))
        state.flying.append(reducer.all_reduce(whole))

    async def step(self, state: OSPState, replica: Replica, port: Port) -> None:
        flying, state.flying = state.flying, []
        late = [replica.blocks[i] for i in state.late]
        important = [replica.blocks[i] for run in state.runs for i in run]
        await self._land(state, replica, port)
        for reduction in flying:
            await reduction
        for block in important:
            block.hand_out()
        if late:
            propagate_overflow(important, important[-1])
        await replica.buffers.finish()
        absent = [block.take_absent() for block in late]
        state.step += 1
        splits = port.world > 1 and self.budget != 0
        if splits:  # before the update: if the loop skips it, the next backward begins before this step ends
            news = await state.meter.read(self._reducer(port), self._usage(port), state.importance)
            state.agreed = news or state.agreed
            self._plan(state, replica, port, news is not None)
        before = norm_of(important) if late else None
        happened = await replica.update(set(important) if late else None)
        if not splits or not happened or replica.optimizer.overflowed:
            return
        self._make_room(state, replica)
        for block in important:
            self._learn(state, block, block.grad)
        if before is not None:
            self._predict(state, replica, late, absent, clip_factor(before, norm_of(important)))
            rates = replica.optimizer.learning_rates
            state.behind.send(port, self._reducer(port), late, absent, rates, self.codec)

    def _predict(
        self, state: OSPState, replica: Replica, late: list[Block], absent: list[list[int]], factor: Tensor
    ) -> None:
        """LGP, with what will travel."""
        guesses = state.behind.pack(late, factor)
        state.behind.keep(late)
        if self.correction == "none":
            return
        missing = {b.params[i] for b, positions in zip(late, absent, strict=True) for i in positions}
        if self.correction == "ema-lgp":
            for block, guess in zip(late, guesses, strict=True):
                guess.lerp_(state.means[block.index], self.mix)
        replica.optimizer.predict(late, guesses, replica.optimizer.learning_rates, missing)
        if self.correction == "ema-lgp":  # a guess is not what travels
            state.behind.pack(late, factor)

    async def _land(self, state: OSPState, replica: Replica, port: Port) -> None:
        """The global weights of what was late, stepped, in the place of their predictions."""
        await state.behind.land(port, replica, self.codec)
        for block, grad in await state.behind.bring_in(replica, replica.optimizer.step):
            self._learn(state, block, grad)
        state.behind.forget()

    async def drain(self, state: OSPState, replica: Replica, port: Port) -> None:
        """Wait, but let the next step take it in: looking at a model must not change its training."""
        await state.behind.land(port, replica, self.codec)
        for pending in state.meter.coming:
            await pending

    async def publish(self, state: OSPState, replica: Replica, port: Port) -> None:
        """The global weights, which all workers can work out from what has arrived."""
        await state.behind.land(port, replica, self.codec)
        await state.behind.bring_in(replica, replica.optimizer.predict)

    # --- the split

    def _plan(self, state: OSPState, replica: Replica, port: Port, news: bool = True) -> None:
        growing = state.step <= self.growth
        if self.importance == "random":
            draw = torch.rand(len(replica.blocks), generator=torch.Generator().manual_seed(state.step))
            state.agreed = draw.tolist()
        elif not (news or growing):
            return
        nbytes = [marked_bytes(block) for block in replica.blocks]
        allowed = self._largest * sum(nbytes)
        if growing:
            allowed *= state.step / self.growth
        if self.budget == "auto":
            late = self._needed(state, replica, nbytes, allowed, port.world)
        else:
            late = least_important(state.agreed, nbytes, allowed, state.pinned)
        if late != state.late:
            state.late, state.runs = late, self._runs(replica, late)

    def _needed(
        self, state: OSPState, replica: Replica, nbytes: list[int], allowed: float, world: int
    ) -> list[int]:
        """As little as leaves almost nothing to wait for that could be hidden."""
        compute_s, part = state.meter.compute_s, self._coded_part(world)
        bytes_per_s = hideable_bytes(1.0, state.meter.bytes_per_s, world)
        if not compute_s or not bytes_per_s:
            return []
        allowed = min(allowed, compute_s * bytes_per_s / part)
        lates, waits = [], []
        for number in range(TRIES + 1):
            late = least_important(state.agreed, nbytes, allowed * number / TRIES, state.pinned)
            sent = self._runs(replica, late)
            lates.append(late)
            waits.append(waiting_s(sent, late, nbytes, compute_s, bytes_per_s, part))
        enough = min(waits) + SLIGHT * compute_s
        return next(late for late, wait in zip(lates, waits, strict=True) if wait <= enough)

    def _coded_part(self, world: int) -> float:
        """What sending a block by the codec takes, to what a ring takes for the block as it is."""
        if self.codec is None or not self.codec.splittable:
            return 1.0
        part = self.codec.wire_ratio
        return part if self.codec.summable else part * world / 2  # packets that are gathered go to everybody

    @property
    def _largest(self) -> float:
        return LARGEST if self.budget == "auto" else float(self.budget)

    def _make_room(self, state: OSPState, replica: Replica) -> None:
        budget = self._largest * sum(marked_bytes(block) for block in replica.blocks)
        state.behind.make_room(replica.blocks, budget)
        if self.correction == "ema-lgp" and not state.means:
            state.means = [torch.zeros_like(block.weight) for block in replica.blocks]

    def _learn(self, state: OSPState, block: Block, grad: Tensor) -> None:
        """A block's averaged gradient has been applied: what it tells of the block."""
        if self.importance != "random":
            scratch = state.behind.scratch(block)
            state.importance[block.index] = importance_of(self.importance, block, grad, scratch)
        if self.correction == "ema-lgp":
            state.means[block.index].lerp_(grad, max(1 - MEMORY, 1 / state.step))
