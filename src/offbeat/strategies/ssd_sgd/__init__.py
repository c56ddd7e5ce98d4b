"""SSD-SGD: several steps delay (Xu et al., ACM TACO). Push gradients every step, pull weights every k steps.

Warm-up: the first `warmup` steps are BSP's. Then, with t counted from 0 and k = `delay`:

    g_i = ∇L(w_loc), as the user's optimizer would see it: unscaled and clipped
    if a pull is in flight, wait for it:  g_sync = (prev − w_glob)/(k·η);  prev ← w_glob
    wait for push(t−1): the owners step w_glob with the mean gradient of step t−1, at its learning rate
    if a pull has arrived:  w_loc ← w_glob, moved on to where it should be by now
    push g_i, in the background
    w_loc ← w_loc − η (α g_i + wd·w_loc + β g_sync)                    no local momentum
    if t−1 ended a period, that is t−1 ≡ k−1 (mod k): start the pull of w_glob as it is, without push(t)

An operation started in step t has until that place in step t+1 to finish, while the worker computes. There a
worker waits for all workers' push(t), so it is never more than one step ahead of the slowest. The pull that
follows push(t) is started in step t+1, when push(t) has arrived, and used in step t+2: neither earlier nor
later, on any worker, however long it took. So a run repeats bit for bit.

From the authors (abstract and code): the rule, k = 5, α = 2 (in another variant 1), β = 0.5, 500 steps of
warm-up, and `scaling`: their code divides g_sync by a tuned constant instead of k·η.

Ours:
- α, unless it is given, is half of a gradient's total weight under momentum, 1/(2(1 − μ)), limited to between
  1 and k; at μ = 0.9 that is 5, and trains better than the authors' 2.
- With `on="collectives"` there is no server: each worker owns a slice of w_glob and of the optimizer's
  state, as in ZeRO-1 (see `weight_store.py`). A push is a reduce-scatter to the owners, a pull an
  all-gather. A pull that has arrived lacks push(t−1): a worker takes its own slice from its own memory,
  where that push is in it, and moves the slices of the others on by one step of g_sync.
- `staggered` pulls. Each slice is cut into k even parts, and to part j the rule above applies with its
  periods shifted by j: it is pulled in the steps t ≡ j (mod k), from t = 1 on. So every step carries a push
  and a k-th of a pull, instead of a whole pull in one of k steps: if k steps of computation can hide the
  pull, each step hides its part. Before part j's first pull, prev is the weights at the end of the warm-up;
  its first g_sync is over the j steps since then (part 0's over k), all others over k. Batch-norm statistics
  travel with part 0.
- With `on="server"`, as the authors had it, w_glob and the optimizer are the server's: it steps once all
  workers' push(t) has arrived, and only then acknowledges push(t). The warm-up is BSP through the server. A
  pull that has arrived lacks push(t−1), so the local step of t−1 is made again on it.
- Memory, beyond the bare loop: a copy of the gradient, since a push is in flight while the next backward
  writes its own; prev; g_sync, in whose memory a pull arrives; and the owned slices of the weights and of the
  optimizer's state. With N workers and an optimizer that holds s numbers per weight these are 3 + (1 + s)/N
  copies of the model. The user's optimizer gives up its own s copies when the warm-up ends: what it steps
  from then on are the owned slices.
- t counts from the end of the warm-up, so that every g_sync is over exactly k steps; where the learning rate
  changes within them, k·η is the sum of their rates.
- A parameter without a gradient here stays as it is until the next pull; one without a gradient anywhere is
  not stepped in w_glob either, so that weight decay leaves it alone. A worker whose optimizer was skipped
  (by a GradScaler) pushes zeros and makes no local step.

With one worker, α = 1, β = 0 and plain SGD, w_loc, w_glob and the plain loop are equal.

Not under elastic: a lost worker takes its slice of w_glob and of the optimizer's state along.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block, Layout
from offbeat.core.fields import Choice, Flag, Number, Whole
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
# Optimizers with learning rates for which a plain step is not too long. Under the adaptive ones it is short.
LINEAR_RATES = ("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")
MAX_PIECE = 1 << 20  # entries that are moved at a time, from g_sync to prev


@dataclass
class SSDSGDState:
    """The state of a worker. Lists of tensors have one per dtype and device, as the replica's weights do."""

    warm_up: BSPState
    step: int = 0
    w_glob: StoreState = field(default_factory=StoreState)  # this worker's part of it
    prev: list[Tensor] = field(default_factory=list)  # w_glob as of the latest pull that has arrived
    g_sync: list[Tensor] = field(
        default_factory=list
    )  # a part whose pull is in flight: w_glob, as it arrives
    pushes: list[Pending[Any]] = field(default_factory=list)  # of the latest step
    rates: LearningRates = field(default_factory=list)  # of that step
    pulls: list[Pending[Any]] = field(default_factory=list)  # to be used in the next step
    lr_sums: list[LearningRates] = field(default_factory=list)  # by part, since its latest pull
    lr_sums_in_pull: LearningRates = field(default_factory=list)  # of the steps that the latest pull contains

    def __post_init__(self) -> None:
        self.workspace: Workspace | None = None  # built from the other fields, so not saved in checkpoints


class StepTensors(NamedTuple):
    """A parameter, and the tensors of its local steps."""

    param: nn.Parameter
    g_sync: Tensor
    pushed: Tensor | None  # the gradient in the latest push to a server
    number: int  # of the parameter's mark in that push


class Workspace:
    """Views and helpers for all steps but those of a warm-up on collectives."""

    def __init__(
        self, state: SSDSGDState, replica: Replica, store: WeightStore, delay: int, parts: int
    ) -> None:
        self.store = store
        if not state.g_sync:
            state.prev, state.g_sync = store.zeros(), store.zeros()
            state.lr_sums = [[0.0] * len(replica.optimizer.groups) for _ in range(parts)]
        self.pulls = PullSchedule(store, replica, delay, parts)
        sizes = [max(1, min(MAX_PIECE, flat.numel() // 32)) for flat in state.g_sync]
        self.spare = [flat.new_empty(size) for flat, size in zip(state.g_sync, sizes, strict=True)]
        stepped: dict[nn.Parameter, StepTensors] = {}
        for k, blocks in enumerate(replica.flat_groups().values()):
            for block in blocks:
                start = int(block.weight.storage_offset())
                syncs = block.views(state.g_sync[k][start:])
                pushed = [block.views(flat[start:]) for flat in state.w_glob.pushed[k : k + 1]]
                for param, g_sync, *own in zip(block.params, syncs, *pushed, strict=True):
                    stepped[param] = StepTensors(param, g_sync, own[0] if own else None, len(stepped))
        self.members = [
            [stepped[p] for p in group["params"] if p in stepped] for group in replica.optimizer.groups
        ]


@dataclass(frozen=True, kw_only=True)
class SSDSGD(Strategy[SSDSGDState]):
    """Strategy that pushes gradients at every step and pulls weights every `delay` steps, both overlapped."""

    name = "ssd_sgd"
    summary = "push gradients every step, pull weights every `delay` steps, all behind computation"
    refused: ClassVar[Mapping[str, str]] = {
        "codec": "owners add up slices, and packets of sparse or quantized slices cannot be added up"
    }

    delay: Annotated[int, Whole("steps from one pull of the weights to the next", of="steps", at_least=1)] = 5
    warmup: Annotated[int, Whole("first steps, in which BSP is used", of="steps", at_least=0)] = 500
    alpha: Annotated[
        float | None,
        Number("weight of the local gradient; None: from the momentum", noun="a finite number", at_least=0),
    ] = None
    beta: Annotated[float, Number("weight of the global gradient", noun="a finite number", at_least=0)] = 0.5
    scaling: Annotated[
        float | None, Number("divisor of the global gradient; None: k·η", noun="a finite number", above=0)
    ] = None
    on: Annotated[str, Choice("where weights and the optimizer's state live", of=PLACES)] = "collectives"
    staggered: Annotated[
        bool | None, Flag("pull a part of the weights at every step; None: where possible")
    ] = None

    def check(self) -> None:
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
        """The number of parts in which the weights are pulled, each in a step of its own."""
        return 1 if self.on_server or self.staggered is False else self.delay

    def layout(self, model: nn.Module) -> Layout:
        # To a server, gradients are sent when the optimizer would have stepped.
        return Layout.default(model, gradients=not self.on_server)

    def init(self, replica: Replica) -> SSDSGDState:
        for optimizer in replica.optimizer.optimizers:
            classes = {cls.__name__ for cls in type(optimizer).__mro__}
            if not classes & {*LINEAR_RATES} and not getattr(optimizer, "linear_rate", False):
                raise SettingError(
                    f"ssd_sgd steps local weights by the learning rate times the gradient, but the learning "
                    f"rate of {type(optimizer).__name__} has another meaning. It works with "
                    f"{', '.join(LINEAR_RATES)}, and with an optimizer of your own that declares it by an "
                    f"attribute linear_rate = True; BSP, LocalSGD, SelSync and DiLoCo with any optimizer"
                )
        return SSDSGDState(WARM_UP.init(replica))

    def ready(self, state: SSDSGDState, replica: Replica, block: Block, port: Port) -> None:
        if state.step < self.warmup:
            WARM_UP.ready(state.warm_up, replica, block, port)

    def check_elastic(self, minimum: int) -> None:
        raise SettingError(
            "elastic=True: under ssd_sgd each worker owns a slice of the weights and the optimizer's state, "
            "which would be lost with the worker; use on='server', where workers may come and go"
        )

    async def step(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        t = state.step - self.warmup
        if t < 0 and not self.on_server:
            await WARM_UP.step(state.warm_up, replica, port)
            state.step += 1
            return
        rates = replica.optimizer.learning_rates
        updating = await replica.about_to_update()
        state.step += 1
        if updating:
            rates = replica.optimizer.learning_rates
        work = self._workspace(state, replica, port)
        if t < 0:
            await self._warm_up(state, work, port, rates, updating)
        else:
            if t == 0:  # w_glob and w_loc are equal for the last time
                for prev, weight in zip(state.prev, replica.weights, strict=True):
                    prev[: weight.numel()].copy_(weight)
            await self._finish(state, work, replica, port, t)
            if not self.on_server:  # first, so that it is in flight during the local step
                state.pushes = work.store.push(port, state.step, rates, skipped=not updating)
            if updating:
                self._step_locally(work, replica, rates)
            self._start_pull(state, work, replica, port, t)  # overwrites a part of g_sync
            if self.on_server:  # a server answers a pull with all pushes that arrived before
                state.pushes = work.store.push(port, state.step, rates, skipped=not updating)
            state.rates = rates
        if updating:
            await replica.update([])
            replica.optimizer.check_separable(self.name)

    async def _warm_up(
        self, state: SSDSGDState, work: Workspace, port: Port, rates: LearningRates, updating: bool
    ) -> None:
        """Make a step of BSP through the server."""
        pushes = work.store.push(port, state.step, rates, skipped=not updating)
        for pending in [*pushes, *work.store.pull(port, state.prev, state.step, Lane.FRONT)]:
            await pending
        work.store.load_pulled(state.prev)

    async def _finish(
        self, state: SSDSGDState, work: Workspace, replica: Replica, port: Port, t: int
    ) -> None:
        """Finish the pull and the push in flight."""
        arrived = work.pulls.of(t - 1)
        if arrived:
            await self._finish_pull(state, work, arrived, replica, port)
        await self._finish_push(state, work)
        if arrived:
            self._load_pulled(state, work, replica, arrived)

    def _start_pull(self, state: SSDSGDState, work: Workspace, replica: Replica, port: Port, t: int) -> None:
        """Start the pull of the part whose period has ended, if there is one."""
        if due := work.pulls.of(t):
            state.pulls = work.store.pull(port, state.g_sync, state.step - 1, Lane.BACK, due.part)
            state.lr_sums_in_pull = state.lr_sums[due.part.number]
            state.lr_sums[due.part.number] = [0.0] * len(replica.optimizer.groups)

    def _load_pulled(
        self, state: SSDSGDState, work: Workspace, replica: Replica, pull: ScheduledPull
    ) -> None:
        """Copy pulled weights to w_loc. The latest push is missing in them: add a prediction of its step."""
        flats = (replica.weights, state.prev, state.g_sync)
        for w_loc, w_glob, g_sync, rate in zip(*map(pull.slices.of, flats), state.rates, strict=True):
            if w_loc:
                torch._foreach_copy_(w_loc, w_glob)
                if not self.on_server:
                    torch._foreach_add_(w_loc, g_sync, alpha=-rate)
        if self.on_server:
            self._step_locally(work, replica, state.rates, state.w_glob.marks)
        work.store.load_own(pull.part)

    async def drain(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        if state.pushes:
            await self._finish_push(state, self._workspace(state, replica, port))
        for pull in state.pulls:  # a later step uses the pulled weights
            await pull

    async def publish(self, state: SSDSGDState, replica: Replica, port: Port) -> list[Tensor]:
        """Return w_glob, without a push that is still in flight."""
        if not self.on_server and not state.g_sync:  # the warm-up, in which replicas are identical
            return replica.weights
        store = self._workspace(state, replica, port).store
        flats = store.zeros()
        for read in store.read(port, flats):
            await read
        return [flat[: weight.numel()] for flat, weight in zip(flats, replica.weights, strict=True)]

    def _workspace(self, state: SSDSGDState, replica: Replica, port: Port) -> Workspace:
        if state.workspace is None:
            own = state.w_glob
            store = ServerStore(own, replica) if self.on_server else ShardedStore(own, replica, port)
            state.workspace = Workspace(state, replica, store, self.delay, self.parts)
        return state.workspace

    async def _finish_push(self, state: SSDSGDState, work: Workspace) -> None:
        if state.pushes:
            arrived = [await push for push in state.pushes]
            state.pushes = []
            work.store.finish_push(arrived, state.rates)
            state.lr_sums = [
                [sum_ + rate for sum_, rate in zip(sums, state.rates, strict=True)] for sums in state.lr_sums
            ]

    async def _finish_pull(
        self, state: SSDSGDState, work: Workspace, pull: ScheduledPull, replica: Replica, port: Port
    ) -> None:
        """Wait for a pull. What arrived in the memory of g_sync becomes prev, and the change of it g_sync."""
        if pull.part.number == 0 and not self.on_server:  # once in a period
            replica.buffers.start(port)
        for pending in state.pulls:
            await pending
        state.pulls = []
        pieces_by_group = pull.slices.pieces([spare.numel() for spare in work.spare])
        for pieces, lr_sum in zip(pieces_by_group, state.lr_sums_in_pull, strict=True):
            divisor = self.scaling or lr_sum
            for kind, start, stop in pieces:
                arrived, prev = state.g_sync[kind][start:stop], state.prev[kind][start:stop]
                change = torch.sub(prev, arrived, out=work.spare[kind][: stop - start])
                prev.copy_(arrived)
                torch.mul(change, 1 / divisor if divisor else 0.0, out=arrived)
        await replica.buffers.finish()

    def _alpha(self, group: Mapping[str, Any]) -> float:
        if self.alpha is not None:
            return self.alpha
        momentum = group.get("momentum", 0.0)
        return max(1.0, min(float(self.delay), 0.5 / (1 - momentum) if momentum < 1 else math.inf))

    def _step_locally(
        self,
        work: Workspace,
        replica: Replica,
        rates: LearningRates,
        pushed_marks: Sequence[float] | None = None,
    ) -> None:
        """Step w_loc. With `pushed_marks`, use the latest push's gradients, for the marked parameters."""
        for group, members, rate in zip(replica.optimizer.groups, work.members, rates, strict=True):
            if pushed_marks is None:
                stepped = [(each.param, each.param.grad, each.g_sync) for each in members]
            else:
                marked = [each for each in members if pushed_marks[each.number]]
                stepped = [(each.param, each.pushed, each.g_sync) for each in marked]
            stepped = [each for each in stepped if each[1] is not None]
            if not stepped:
                continue
            params, grads, syncs = (list(column) for column in zip(*stepped, strict=True))
            if decay := group.get("weight_decay", 0):
                torch._foreach_mul_(params, 1 - rate * decay)
            signed_rate = rate if group.get("maximize") else -rate
            torch._foreach_add_(params, grads, alpha=signed_rate * self._alpha(group))
            if self.beta:
                torch._foreach_add_(params, syncs, alpha=-rate * self.beta)
