"""SSD-SGD: several steps delay (Xu et al., ACM TACO). Gradients go out every step, weights come in every k.

Warm-up: the first `warmup` steps are BSP's. Then, with t counted from 0 and k = `delay`:

    g_i = ∇L(w_loc), as the user's optimizer would see it: unscaled and clipped
    if a pull is under way, wait for it:  g_sync = (prev − w_glob)/(k·η);  prev ← w_glob
    wait for push(t−1): the owners step w_glob with the mean gradient of step t−1, at its learning rate
    if a pull has come:  w_loc ← w_glob, brought to where it should be by now
    if t−1 ended a period, that is t−1 ≡ k−1 (mod k): start the pull of w_glob as it is now
    push g_i, in the background
    w_loc ← w_loc − η (α g_i + wd·w_loc + β g_sync)                    no local momentum

What is started in step t has until that place in step t+1 to arrive, while the worker computes. There a
worker waits for everybody's push(t), so it is never more than one step ahead of the slowest. The pull that
follows push(t) is started in step t+1, when push(t) is in, and used in step t+2: neither earlier nor later,
on any worker, however long it took. So a run repeats bit for bit.

From the authors (abstract and code): the rule, k = 5, α = 2 (in another variant 1), β = 0.5, 500 steps of
warm-up, and `scaling`: their code splittable g_sync by a tuned constant instead of k·η.

Ours: α, unless it is given, is half of what momentum makes of a gradient in the end, 1/(2(1 − μ)), within 1
and k; at μ = 0.9 that is 5, and trains better than the authors' 2. With `on="collectives"` there is no
server: w_glob and the optimizer's state live in shares, one a worker (see `weight_store.py`); push is a
scatter to the owners, pull a gather. When a pull has come, w_loc lacks push(t−1): a worker takes its own
share from where it lies, with that in it, and moves the others' on by one step of g_sync.

Ours, too: `staggered` pulls. Each share is cut into k even parts, and to part j the rule above applies with
its periods shifted by j: it is pulled in the steps t ≡ j (mod k), from t = 1 on. So every step carries a push
and a k-th of a pull, instead of one of k steps a push and all of it, and what hides behind computation on the
whole hides in each step. Before part j's first pull prev is what the warm-up ended with; its first g_sync is
over the j steps since then (part 0's over k), all others over k. Batch-norm statistics travel with part 0.

With `on="server"`, as the authors had it, w_glob and the optimizer are the server's: it steps once, when
everybody's push(t) is there, and only then is push(t) acknowledged. The warm-up is BSP through the server.
When a pull has come, w_loc lacks push(t−1), so the local step of t−1 is made again on it. Either way, with
one worker, α = 1, β = 0 and plain SGD, w_loc, w_glob and the plain loop are equal. t counts from the end of
the warm-up, so that every g_sync is of exactly k steps; where the learning rate changes within them, k·η is
the sum of their rates. A parameter without a gradient here stays as it is until the next pull; one without
a gradient anywhere is not stepped in w_glob either, so that weight decay leaves it alone. A worker whose
optimizer was skipped (by a GradScaler) pushes zeros and makes no local step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block, Layout
from offbeat.core.optimizer import LearningRates
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.server.aggregation import Barrier
from offbeat.server.half import ServerHalf
from offbeat.server.rule import LockStep
from offbeat.strategies.bsp import BSP, BSPState
from offbeat.strategies.ssd_sgd.pull_schedule import PullSchedule, ScheduledPull
from offbeat.strategies.ssd_sgd.weight_store import ServerStore, ShardedStore, StoreState, WeightStore

WARM_UP = BSP()
PLACES = ("collectives", "server")


@dataclass
class SSDSGDState:
    """Where a worker stands. Tensors are one for each dtype and device, as the replica's weights are."""

    step: int = 0
    reductions: BSPState = field(default_factory=BSPState)
    w_glob: StoreState = field(default_factory=StoreState)  # what this worker keeps of it
    pulled: list[list[Tensor]] = field(default_factory=list)  # prev and w_glob, by turns (see `PullSchedule`)
    g_sync: list[Tensor] = field(default_factory=list)
    pushes: list[Pending[Any]] = field(default_factory=list)  # of the latest step
    rates: LearningRates = field(default_factory=list)  # of that step
    pulls: list[Pending[Any]] = field(default_factory=list)  # to be used in the next step
    spent: list[LearningRates] = field(
        default_factory=list
    )  # sums of rates since the latest pull of each part
    spent_in_pull: LearningRates = field(default_factory=list)  # and of those that the latest pull brings

    def __post_init__(self) -> None:
        self.desk: Workspace | None = None  # made from the rest, so no part of a checkpoint


class Stepped(NamedTuple):
    """A parameter, and what there is for its local steps."""

    param: nn.Parameter
    g_sync: Tensor
    pushed: Tensor | None  # its latest gradient at the server
    number: int  # of its mark there


class Workspace:
    """What is at hand for all steps but those of a warm-up on collectives."""

    def __init__(
        self, state: SSDSGDState, replica: Replica, home: WeightStore, delay: int, parts: int
    ) -> None:
        self.home = home
        if not state.g_sync:
            *state.pulled, state.g_sync = (home.room() for _ in range(3))
            state.spent = [[0.0] * len(replica.optimizer.groups) for _ in range(parts)]
        self.pulls = PullSchedule(home, replica, delay, parts, state.pulled)
        stepped: dict[nn.Parameter, Stepped] = {}
        for k, blocks in enumerate(replica.flat_groups().values()):
            for block in blocks:
                start = int(block.weight.storage_offset())
                syncs = block.views(state.g_sync[k][start:])
                pushed = [block.views(flat[start:]) for flat in state.w_glob.pushed[k : k + 1]]
                for param, g_sync, *own in zip(block.params, syncs, *pushed, strict=True):
                    stepped[param] = Stepped(param, g_sync, own[0] if own else None, len(stepped))
        self.members = [
            [stepped[p] for p in group["params"] if p in stepped] for group in replica.optimizer.groups
        ]


@dataclass(frozen=True, kw_only=True)
class SSDSGD(Strategy[SSDSGDState]):
    """Push gradients at every step, pull weights every `delay` steps, both behind computation."""

    name = "ssd_sgd"
    no_codec = "owners add up shares as they come, and packets of sparse or quantized shares do not add up"
    summary = "push gradients every step, pull weights every `delay` steps, all behind computation"

    delay: int = 5
    warmup: int = 500
    alpha: float | None = None
    beta: float = 0.5
    scaling: float | None = None
    on: str = "collectives"
    staggered: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.delay, int) or self.delay < 1:
            raise SettingError(f"delay={self.delay!r}: a whole number of steps, at least 1")
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise SettingError(f"warmup={self.warmup!r}: a whole number of steps, 0 or more")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if name == "alpha" and value is None:
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise SettingError(f"{name}={value!r}: a finite number, 0 or more")
        scaling = 1.0 if self.scaling is None else self.scaling
        if not isinstance(scaling, int | float) or not 0 < scaling < math.inf:
            raise SettingError(f"scaling={scaling!r}: a finite number above 0, or None, for k·η")
        if self.on not in PLACES:
            raise SettingError(f"on={self.on!r}: choose one of {', '.join(PLACES)}")
        if not isinstance(self.staggered, bool | None):
            raise SettingError(
                f"staggered={self.staggered!r}: True, False, or None, for True where it can be"
            )
        if self.staggered and self.on_server:
            raise SettingError(
                "staggered=True: only with on='collectives'; a server answers a pull with all of its weights"
            )

    def server_half(self) -> ServerHalf | None:
        if not self.on_server:
            return None
        return ServerHalf(rule=LockStep(), aggregation=Barrier, owns_optimizer=True)

    @property
    def on_server(self) -> bool:
        return self.on == "server"

    @property
    def parts(self) -> int:
        """In how many parts the weights are pulled, each in a step of its own."""
        return 1 if self.on_server or self.staggered is False else self.delay

    def layout(self, model: nn.Module) -> Layout:
        # To a server, gradients travel when the optimizer would have stepped.
        return Layout.default(model, gradients=not self.on_server)

    def init(self, replica: Replica) -> SSDSGDState:
        return SSDSGDState()

    def ready(self, state: SSDSGDState, replica: Replica, block: Block, port: Port) -> None:
        if state.step < self.warmup:
            WARM_UP.ready(state.reductions, replica, block, port)

    async def step(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        t = state.step - self.warmup
        state.step += 1  # now: should the optimizer be skipped, this step ends only behind the next backward
        if t < 0 and not self.on_server:
            await WARM_UP.step(state.reductions, replica, port)
            return
        rates = replica.optimizer.learning_rates
        updating = await replica.about_to_update()
        if updating:
            rates = replica.optimizer.learning_rates
        desk = self._desk(state, replica, port)
        if t < 0:
            await self._warm_up(state, desk, port, rates, updating)
        else:
            if t == 0:  # w_glob and w_loc part here
                for prev, weight in zip(chain(*state.pulled), cycle(replica.weights), strict=False):
                    prev[: weight.numel()].copy_(weight)
            await self._exchange(state, desk, replica, port, t)
            state.pushes = desk.home.push(port, state.step, rates, skipped=not updating)
            state.rates = rates
            if updating:
                self._step_locally(desk, replica, rates)
        if updating:
            await replica.update([])

    async def _warm_up(
        self, state: SSDSGDState, desk: Workspace, port: Port, rates: LearningRates, updating: bool
    ) -> None:
        """BSP through the server: its step, before anybody goes on."""
        pushes = desk.home.push(port, state.step, rates, skipped=not updating)
        for pending in [*pushes, *desk.home.pull(port, state.pulled[0], state.step, Lane.FRONT)]:
            await pending
        desk.home.adopt(state.pulled[0])

    async def _exchange(
        self, state: SSDSGDState, desk: Workspace, replica: Replica, port: Port, t: int
    ) -> None:
        """Take in what was under way, and start the pull of what has ended its period."""
        came, begins = desk.pulls.of(t - 1), desk.pulls.of(t)
        if came:
            await self._take_in_pull(state, came, replica, port)
        await self._take_in_push(state, desk)
        if came:
            self._adopt(state, desk, replica, came)
        if begins:
            state.pulls = desk.home.pull(port, begins.w_glob, state.step - 1, Lane.BACK, begins.part)
            state.spent_in_pull = state.spent[begins.part.number]
            state.spent[begins.part.number] = [0.0] * len(replica.optimizer.groups)

    def _adopt(self, state: SSDSGDState, desk: Workspace, replica: Replica, pull: ScheduledPull) -> None:
        """Make w_loc what was pulled. That lacks the latest push: bring it to where w_glob should be."""
        flats = (replica.weights, pull.w_glob, state.g_sync)
        for w_loc, w_glob, g_sync, rate in zip(*map(pull.stretches.of, flats), state.rates, strict=True):
            if w_loc:
                torch._foreach_copy_(w_loc, w_glob)
                if not self.on_server:
                    torch._foreach_add_(w_loc, g_sync, alpha=-rate)
        if self.on_server:
            self._step_locally(desk, replica, state.rates, state.w_glob.marks)
        desk.home.adopt_own(pull.part)

    async def drain(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        if state.pushes:
            await self._take_in_push(state, self._desk(state, replica, port))
        for pull in state.pulls:  # used in its own step, not before
            await pull

    async def publish(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        if not self.on_server and not state.g_sync:  # the warm-up, in which replicas agree
            return
        home = self._desk(state, replica, port).home
        flats = home.room()
        for pull in home.pull(port, flats, None, Lane.FRONT):
            await pull
        home.adopt(flats)
        home.adopt_own()

    def _desk(self, state: SSDSGDState, replica: Replica, port: Port) -> Workspace:
        if state.desk is None:
            kept = state.w_glob
            home = ServerStore(kept, replica) if self.on_server else ShardedStore(kept, replica, port)
            state.desk = Workspace(state, replica, home, self.delay, self.parts)
        return state.desk

    async def _take_in_push(self, state: SSDSGDState, desk: Workspace) -> None:
        if state.pushes:
            arrived = [await push for push in state.pushes]
            state.pushes = []
            desk.home.take_in(arrived, state.rates)
            state.spent = [
                [sum_ + rate for sum_, rate in zip(sums, state.rates, strict=True)] for sums in state.spent
            ]

    async def _take_in_pull(
        self, state: SSDSGDState, pull: ScheduledPull, replica: Replica, port: Port
    ) -> None:
        if pull.part.number == 0 and not self.on_server:  # once in a period
            replica.buffers.start(port)
        for pending in state.pulls:
            await pending
        state.pulls = []
        views = map(pull.stretches.of, (state.g_sync, pull.prev, pull.w_glob))
        for g_sync, prev, w_glob, spent in zip(*views, state.spent_in_pull, strict=True):
            divisor = self.scaling or spent
            if g_sync:
                torch._foreach_copy_(g_sync, prev)
                torch._foreach_sub_(g_sync, w_glob)
                torch._foreach_mul_(g_sync, 1 / divisor if divisor else 0.0)
        await replica.buffers.finish()

    def _alpha(self, group: Mapping[str, Any]) -> float:
        if self.alpha is not None:
            return self.alpha
        momentum = group.get("momentum", 0.0)
        return max(1.0, min(float(self.delay), 0.5 / (1 - momentum) if momentum < 1 else math.inf))

    def _step_locally(
        self, desk: Workspace, replica: Replica, rates: LearningRates, again: Sequence[float] | None = None
    ) -> None:
        """`again`: with the gradients of the latest push, which were for the parameters that it marks."""
        for group, members, rate in zip(replica.optimizer.groups, desk.members, rates, strict=True):
            if again is None:
                stepped = [(each.param, each.param.grad, each.g_sync) for each in members]
            else:
                had = [each for each in members if again[each.number]]
                stepped = [(each.param, each.pushed, each.g_sync) for each in had]
            stepped = [each for each in stepped if each[1] is not None]
            if not stepped:
                continue
            params, grads, syncs = (list(column) for column in zip(*stepped, strict=True))
            if decay := group.get("weight_decay", 0):
                torch._foreach_mul_(params, 1 - rate * decay)
            along = rate if group.get("maximize") else -rate
            torch._foreach_add_(params, grads, alpha=along * self._alpha(group))
            if self.beta:
                torch._foreach_add_(params, syncs, alpha=-rate * self.beta)
