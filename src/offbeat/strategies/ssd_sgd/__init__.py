"""SSD-SGD: several steps delay (Xu et al., ACM TACO). Push gradients every step, pull weights every k steps.

Warm-up: the first `warmup` steps are BSP's. Then, with t counted from 0, k = `delay`, and m for the whole
state of the user's optimizer (momentum, Adam's moments, step counters):

    g_i = ∇L(w_loc), as the user's optimizer would see it: unscaled and clipped
    wait for push(t−1): the owners step w_glob, m_glob with the mean gradient of t−1, at its learning rate
    if a pull has arrived:  w_loc, m_loc ← w_glob, m_glob, and the local step of t−1 made again from there
    push g_i, in the background
    if t−1 ended a period, that is t−1 ≡ k−1 (mod k): start the pull of w_glob, m_glob, without push(t)
    w_loc, m_loc ← the step of the user's optimizer with g_i

An operation started in step t has until that place in step t+1 to finish, while the worker computes. There a
worker waits for all workers' push(t), so it is never more than one step ahead of the slowest. A pull started
in step t is used in step t+1: neither earlier nor later, on any worker, however long it took. So a run
repeats bit for bit.

From the authors (abstract and code): pushes every step, pulls every k steps, k = 5, the warm-up, and
`rule="authors"`, their local steps (see `authors.py`).

Ours:
- `rule="carried"`, above: the optimizer's state is pulled with the weights (see `carried.py`). Local steps
  are then the user's own, for any optimizer that keeps its state per parameter. The authors' local steps lack
  momentum, so between two pulls they go elsewhere than w_glob does: on digits (8 workers, rate 0.2, momentum
  0.9, two seeds) they end at 57 and 61%, these at 97 and 98%, as BSP does (docs/strategies/ssd_sgd.md).
- With `on="collectives"` there is no server: each worker owns a slice of w_glob and of m_glob, as in ZeRO-1
  (see `weight_store.py`). A push is a reduce-scatter to the owners, a pull an all-gather. Of its own slice a
  worker has the step t−1 itself, so it is not made again. With s numbers of state per weight, a worker sends
  |w|(1 + (1+s)/k) bytes per step: 1 + 2/k with momentum, 1 + 3/k with Adam, against BSP's 2.
- `staggered` pulls. Each slice is cut into k even parts, and to part j the rule above applies with its
  periods shifted by j: it is pulled in the steps t ≡ j (mod k), from t = 1 on. So every step carries a push
  and a k-th of a pull, instead of a whole pull in one of k steps. Batch-norm statistics travel with part 0.
- With `on="server"`, as the authors had it, w_glob and the optimizer are the server's: it steps once all
  workers' push(t) has arrived, and only then acknowledges push(t). The warm-up is BSP through the server.
- Memory, beyond the bare loop, in copies of the model: a copy of the gradient, since a push is in flight
  while the next backward writes its own; of what others own of the part that is pulled its weights, its state
  and the gradient to make the step again with; and the owned slices, which are sent from where they are. With
  N workers these are 1 + (2+s)(N−1)/(N·k) + (1+s)/N.
- A parameter without a gradient here makes no local step; one without a gradient anywhere is not stepped in
  w_glob either, so that weight decay leaves it alone. A worker whose optimizer was skipped (by a GradScaler)
  pushes zeros and makes no local step.

With one worker, or with the same data on all workers, this is BSP.

Under elastic every worker owns everything: a push is an all-reduce, over the workers that are left, and a
pull a copy. Nothing is lost with a worker but the gradient that it had not pushed. The price: BSP's bytes,
though all behind computation, and 1 + s copies of the model. A slice that one worker has alone would be lost
with it, or be k steps older than the others if it were rebuilt from the last pull; a second owner of each
slice would save bytes, but not live through the loss of two neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from offbeat.core.blocks import Block, Layout
from offbeat.core.fields import Choice, Flag, Number, Whole
from offbeat.core.optimizer import LearningRates
from offbeat.core.partition import WHOLE
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.server.aggregation import Barrier
from offbeat.server.half import ServerHalf
from offbeat.server.rule import LockStep
from offbeat.strategies.bsp import BSP, BSPState
from offbeat.strategies.ssd_sgd.authors import Authors, AuthorsState
from offbeat.strategies.ssd_sgd.carried import Carried, CarriedState
from offbeat.strategies.ssd_sgd.pull_schedule import PullSchedule, ScheduledPull
from offbeat.strategies.ssd_sgd.weight_store import ServerStore, ShardedStore, StoreState, WeightStore

WARM_UP = BSP()
PLACES = ("collectives", "server")
RULES = ("carried", "authors")
BETA = 0.5  # the authors'
# Optimizers with learning rates for which a plain step is not too long. Under the adaptive ones it is short.
LINEAR_RATES = ("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")


@dataclass
class SSDSGDState:
    """The state of a worker."""

    warm_up: BSPState
    step: int = 0
    w_glob: StoreState = field(default_factory=StoreState)  # this worker's part of it
    carried: CarriedState = field(default_factory=CarriedState)
    authors: AuthorsState = field(default_factory=AuthorsState)
    pushes: list[Pending[Any]] = field(default_factory=list)  # of the latest step
    rates: LearningRates = field(default_factory=list)  # of that step
    pulls: list[Pending[Any]] = field(default_factory=list)  # to be used in the next step

    def __post_init__(self) -> None:
        self.workspace: Workspace | None = None  # built from the other fields, so not saved in checkpoints


class Workspace:
    """Helpers for all steps but those of a warm-up on collectives."""

    def __init__(self, strategy: SSDSGD, state: SSDSGDState, replica: Replica, store: WeightStore) -> None:
        self.store = store
        self.pulls = PullSchedule(store, replica, strategy.delay, strategy.parts)
        self.carried: Carried | None = None
        self.authors: Authors | None = None
        if strategy.rule == "carried":
            parcels = store.parcels(state.carried.parcels)
            self.carried = Carried(state.carried, replica, parcels, trusts_numbers=not strategy.on_server)
            self.pulled = state.carried.parcels.parcels[: len(replica.weights)]
        else:
            beta = BETA if strategy.beta is None else strategy.beta
            self.authors = Authors(
                state.authors, replica, store, strategy.parts, strategy.alpha, beta, strategy.scaling
            )
            store.free_replica_state()
            self.pulled = state.authors.prev


@dataclass(frozen=True, kw_only=True)
class SSDSGD(Strategy[SSDSGDState]):
    """Strategy that pushes gradients at every step and pulls weights every `delay` steps, both overlapped."""

    name = "ssd_sgd"
    summary = "push gradients every step, pull weights every `delay` steps, all behind computation"
    refused: ClassVar[Mapping[str, str]] = {
        "codec": "owners add up slices, and packets of sparse or quantized slices cannot be added up"
    }

    delay: Annotated[int, Whole("steps from one pull of the weights to the next", of="steps", at_least=1)] = 5
    warmup: Annotated[int, Whole("first steps, in which BSP is used", of="steps", at_least=0)] = 20
    rule: Annotated[str, Choice("what local steps are", of=RULES)] = "carried"
    alpha: Annotated[
        float | None,
        Number("weight of the local gradient; None: from the momentum", noun="a finite number", at_least=0),
    ] = None
    beta: Annotated[
        float | None,
        Number("weight of the global gradient; None: 0.5", noun="a finite number", at_least=0),
    ] = None
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
        for setting in ("alpha", "beta", "scaling"):
            if self.rule != "authors" and getattr(self, setting) is not None:
                raise SettingError(
                    f"{setting}={getattr(self, setting)}: only with rule='authors'; with rule='{self.rule}' "
                    "local steps are those of your own optimizer, which need no such constant"
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
        collective = not self.on_server
        return Layout.default(model, gradients=collective, keeps_loaded=collective, keeps_edits=False)

    def init(self, replica: Replica) -> SSDSGDState:
        replica.optimizer.check_separable(self.name)
        for optimizer in replica.optimizer.optimizers if self.rule == "authors" else ():
            classes = {cls.__name__ for cls in type(optimizer).__mro__}
            if not classes & {*LINEAR_RATES} and not getattr(optimizer, "linear_rate", False):
                raise SettingError(
                    f"with rule='authors' ssd_sgd steps local weights by the learning rate times the "
                    f"gradient, but the learning rate of {type(optimizer).__name__} has another meaning. It "
                    f"works with {', '.join(LINEAR_RATES)}, and with an optimizer of your own that declares "
                    f"it by an attribute linear_rate = True; rule='carried' works with any optimizer"
                )
        return SSDSGDState(WARM_UP.init(replica))

    def ready(self, state: SSDSGDState, replica: Replica, block: Block, port: Port) -> None:
        if state.step < self.warmup:
            WARM_UP.ready(state.warm_up, replica, block, port)

    async def step(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        t = state.step - self.warmup
        if t < 0 and not self.on_server:
            await WARM_UP.step(state.warm_up, replica, port)
            state.step += 1
            return
        rates = replica.optimizer.learning_rates
        updating = await replica.about_to_update()
        replica.optimizer.check_held_state(self.name)
        state.step += 1
        if updating:
            rates = replica.optimizer.learning_rates
        work = self._workspace(state, replica, port)
        steps_own = False  # whether the user's optimizer makes the local step
        if t < 0:
            await self._warm_up(state, work, port, rates, updating)
        elif work.carried is not None:
            await self._exchange_carried(state, work, work.carried, replica, port, t, rates, updating)
            steps_own = True
        elif work.authors is not None:
            await self._exchange_authors(state, work, work.authors, replica, port, t, rates, updating)
        if updating:
            # All blocks, not None: the owners step every parameter, so every optimizer must step here, too.
            await replica.update(replica.blocks if steps_own else [])
            replica.optimizer.remember_settings()
            replica.optimizer.check_separable(self.name)
        replica.optimizer.hold_state()

    async def _warm_up(
        self, state: SSDSGDState, work: Workspace, port: Port, rates: LearningRates, updating: bool
    ) -> None:
        """Make a step of BSP through the server; after the last one, pull the optimizer's state as well."""
        pushes = work.store.push(port, state.step, rates, skipped=not updating)
        if work.carried is not None and state.step == self.warmup:
            for pending in pushes:  # acknowledged when the server has stepped: only then its state is right
                await pending
            for pending in work.carried.parcels.pull(port, WHOLE, state.step):
                await pending
            work.carried.adopt(WHOLE, rates, [], redo=False)
        else:
            for pending in [*pushes, *work.store.pull(port, work.pulled, state.step, Lane.FRONT)]:
                await pending
            work.store.load_pulled(work.pulled)

    async def _exchange_carried(
        self,
        state: SSDSGDState,
        work: Workspace,
        local: Carried,
        replica: Replica,
        port: Port,
        t: int,
        rates: LearningRates,
        updating: bool,
    ) -> None:
        """Finish what is in flight and use it; send this step's gradient, and start the pull that is due."""
        arrived, due = work.pulls.of(t - 1), work.pulls.of(t)
        if arrived:
            await self._finish_pull(state, replica, port, arrived)
        await self._finish_push(state, work)
        if arrived:
            local.adopt(arrived.part, state.rates, work.store.missing)
        if due and self.on_server:  # a server answers a pull with all pushes that arrived before
            state.pulls = local.parcels.pull(port, due.part, state.step - 1)
        state.pushes = work.store.push(port, state.step, rates, skipped=not updating)
        state.rates = rates
        local.note_missing(work.store.missing)
        if due:
            local.keep(due.part)
        if due and not self.on_server:
            state.pulls = local.parcels.pull(port, due.part, state.step - 1)

    async def _exchange_authors(
        self,
        state: SSDSGDState,
        work: Workspace,
        local: Authors,
        replica: Replica,
        port: Port,
        t: int,
        rates: LearningRates,
        updating: bool,
    ) -> None:
        """Do the same by the authors' rule, and make the local step."""
        due = work.pulls.of(t)
        if t == 0:
            local.start()
        await self._finish_push(state, work)
        if due:
            if not self.on_server:
                state.pulls = work.store.pull(
                    port, state.authors.g_sync, state.step - 1, Lane.FRONT, due.part
                )
            await self._finish_pull(state, replica, port, due)
            local.adopt(due)
        state.pushes = work.store.push(port, state.step, rates, skipped=not updating)
        state.rates = rates
        if updating:
            local.step(rates)
        if self.on_server and work.pulls.of(t + 1):  # answered once all workers have pushed this step
            state.pulls = work.store.pull(port, state.authors.g_sync, state.step, Lane.BACK)

    async def _finish_push(self, state: SSDSGDState, work: Workspace) -> None:
        if state.pushes:
            arrived = [await push for push in state.pushes]
            state.pushes = []
            work.store.finish_push(arrived, state.rates)
            if work.authors is not None:
                work.authors.count(state.rates)

    async def _finish_pull(
        self, state: SSDSGDState, replica: Replica, port: Port, pull: ScheduledPull
    ) -> None:
        if pull.part.number == 0 and not self.on_server:  # once in a period
            replica.buffers.start(port)
        for pending in state.pulls:
            await pending
        state.pulls = []
        await replica.buffers.finish()

    async def drain(self, state: SSDSGDState, replica: Replica, port: Port) -> None:
        for pull in state.pulls:  # a later step uses what has arrived
            await pull
        state.pulls = []
        if state.pushes:  # after the pulls, which send what the owners step now
            await self._finish_push(state, self._workspace(state, replica, port))

    async def publish(self, state: SSDSGDState, replica: Replica, port: Port) -> list[Tensor]:
        """Return w_glob, without a push that is still in flight."""
        if not self.on_server and state.step <= self.warmup:  # replicas are identical
            return replica.weights
        store = self._workspace(state, replica, port).store
        flats = store.zeros()
        for read in store.read(port, flats):
            await read
        return [flat[: weight.numel()] for flat, weight in zip(flats, replica.weights, strict=True)]

    def _workspace(self, state: SSDSGDState, replica: Replica, port: Port) -> Workspace:
        if state.workspace is None:
            own = state.w_glob
            parts = (
                self.parts if self.rule == "carried" else 1
            )  # in which weights and state are sent in place
            store = ServerStore(own, replica) if self.on_server else ShardedStore(own, replica, port, parts)
            state.workspace = Workspace(self, state, replica, store)
        return state.workspace
