"""Elastic workers in virtual time: processes die, hang, are cut off and start again as the cluster says.

The rules of membership, of redoing exchanges and of handing over the state are those of core, as over
processes. Only the registry, the detector and the exchanges are of this world.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.core.elastic import check_elastic
from offbeat.core.ledger import Ledger
from offbeat.core.membership import Member, NotAdmitted
from offbeat.core.strategy import Strategy
from offbeat.errors import RankDropped, RankLost
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.cuda_graphs import Gradient
from offbeat.worlds.virtual.elastic.exchanges import Exchanges
from offbeat.worlds.virtual.elastic.life import Life, Lives, VirtualDetector
from offbeat.worlds.virtual.elastic.looking import ElasticLookout, Readings
from offbeat.worlds.virtual.elastic.port import VirtualRosterPort
from offbeat.worlds.virtual.elastic.registry import SharedRegistry, VirtualRegistry
from offbeat.worlds.virtual.elastic.session import ElasticVirtualSession
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.outages import Absence, ElasticTimes, Hang
from offbeat.worlds.virtual.scheduler import Process, Scheduler
from offbeat.worlds.virtual.simulation import rare_garbage_collection

T = TypeVar("T")
EXACT_S = 1e-9  # two times that differ by less are one
PAUSED_S = 1e-3  # to look again at an outage that falls into a pause of the training time


def run_elastic_workers(
    workers: int,
    cluster: Cluster,
    strategy: Strategy[Any],
    build: Callable[[int], tuple[nn.Module, list[Optimizer]]],
    gradient: Gradient,
    train: Callable[[ElasticVirtualSession], Coroutine[Any, Any, T]],
    *,
    minimum: int = 1,
    on_start: Callable[[list[Ledger]], None] = lambda ledgers: None,
    **options: Any,
) -> list[T | None]:
    """Run `train` for workers that may be lost and return; return the results of those who came to the end.

    The arguments are those of `run_workers`, and `minimum`: with fewer workers than that, all stop. `train`
    is called once for each process of a worker, and goes by `session.clock`. `on_start` is called with the
    ledgers, by rank. Raise RankLost if no worker came to the end.
    """
    check_elastic(strategy, minimum)
    crew: Crew[T] = Crew(cluster.for_workers(workers), strategy, build, gradient, train, minimum, options)
    on_start(crew.ledgers)
    return crew.run()


class Crew(Generic[T]):
    """All workers of a run, the network, and what is known of each other."""

    def __init__(
        self,
        cluster: Cluster,
        strategy: Strategy[Any],
        build: Callable[[int], tuple[nn.Module, list[Optimizer]]],
        gradient: Gradient,
        train: Callable[[ElasticVirtualSession], Coroutine[Any, Any, T]],
        minimum: int,
        options: dict[str, Any],
    ) -> None:
        self.scheduler = Scheduler(Network(cluster))
        self.ledgers = [Ledger(rank, self.scheduler.clock) for rank in range(cluster.size)]
        self._readings = Readings(self.ledgers)
        self.registry = SharedRegistry()
        self.lives = Lives(self.scheduler, cluster.elastic or ElasticTimes())
        self.evaluations = ElasticLookout(self.scheduler, self.lives)
        self.exchanges = Exchanges(self.scheduler, self.ledgers, self.lives)
        self.results: list[T | None] = [None] * cluster.size
        self.errors: list[RankLost] = []
        self._cluster = cluster
        self._outages = [cluster.outages(rank) for rank in range(cluster.size)]
        self._late = [bool(own) and _from_the_start(own[0]) for own in self._outages]
        self._strategy = strategy
        self._gradient = gradient
        self._build = build
        self._train = train
        self._minimum = minimum
        self._options = options
        self._alive: dict[int, tuple[Life, Process]] = {}  # by rank

    def run(self) -> list[T | None]:
        with rare_garbage_collection():
            for rank, late in enumerate(self._late):
                if late:
                    self._return_after(rank, 0)
                else:
                    self._start(rank)
            try:
                with torch.no_grad():
                    self.scheduler.run()
            finally:  # after an interrupt, loops must still close their files
                for _, process in self._alive.values():
                    process.kill()
        if all(result is None for result in self.results):
            raise self._why_ended()
        return self.results

    def _why_ended(self) -> RankLost:
        """Return the error of most workers, or the last such one: who gave up alone did not end the run."""
        texts = Counter(str(error) for error in reversed(self.errors))
        return RankLost(texts.most_common(1)[0][0] if texts else "all workers were lost before the end")

    # --- a worker

    def _start(self, rank: int) -> None:
        life = self.lives.begin(rank)
        process = self.scheduler.spawn(f"worker {rank}", self._live(rank, life))
        self._alive[rank] = life, process

    async def _live(self, rank: int, life: Life) -> None:
        """Train until the end; who is dropped, or not admitted in time, starts anew, as by a launcher."""
        ledger = self.ledgers[rank]
        while True:
            try:
                session = self._session(life)
                await session.start()
                if session.founds:  # training time begins here
                    self.scheduler.at(self.scheduler.now, lambda: self._expect_outage(rank, 0))
                self.results[rank] = await self._train(session)
            except (RankDropped, NotAdmitted):
                ledger.lose_steps()
                self._end(life)
                life = self.lives.begin(rank)
                self._alive[rank] = life, self._alive[rank][1]
                continue
            except RankLost as lost:
                self.errors.append(lost)
            break
        self._end(life)
        ledger.stop()
        del self._alive[rank]

    def _end(self, life: Life, known_after_s: float = 0.0) -> None:
        life.end(known_after_s)
        self.exchanges.on_death(life)
        self.evaluations.remove(life)
        self.lives.announce(life)

    def _session(self, life: Life) -> ElasticVirtualSession:
        registry = VirtualRegistry(self.registry, life)
        detector = VirtualDetector(life, self.lives, registry)
        founders = max(self._late.count(False), self._minimum)
        member = Member(life.name, registry, detector, self._minimum, founders)
        ledger = self.ledgers[life.rank]
        port = VirtualRosterPort(member, registry, detector, life, self.exchanges, ledger)
        founds = life.name.endswith("-0") and not self._late[life.rank]
        model, optimizers = self._build(life.rank)
        return ElasticVirtualSession(
            life,
            founds,
            port,
            registry,
            self._readings,
            self.evaluations,
            model,
            optimizers,
            self._strategy,
            self._gradient,
            self._cluster,
            **self._options,
        )

    # --- what the cluster does to it

    def _expect_outage(self, rank: int, index: int) -> None:
        """Wait for the worker's outage of this index, in training time."""
        if rank not in self._alive or index == len(self._outages[rank]):
            return
        ledger = self.ledgers[rank]
        left_s = self._outages[rank][index].from_s - ledger.seconds
        if left_s > EXACT_S:
            left_s = max(left_s, PAUSED_S) if ledger.is_paused else left_s
            self.scheduler.at(self.scheduler.now + left_s, lambda: self._expect_outage(rank, index))
            return
        self._suffer(rank, index)

    def _suffer(self, rank: int, index: int) -> None:
        outage = self._outages[rank][index]
        life, _ = self._alive[rank]
        seconds = outage.until_s - outage.from_s
        if isinstance(outage, Absence):
            self._kill(rank, self.lives.times.death_s)
            self._return_after(rank, index)
        elif seconds == math.inf:
            self._kill(rank, math.inf)  # nobody tells the others
        else:
            life.hang(seconds) if isinstance(outage, Hang) else life.cut(seconds)
            self.lives.announce(life)
            self._expect_outage(rank, index + 1)

    def _kill(self, rank: int, known_after_s: float) -> None:
        life, process = self._alive.pop(rank)
        self._end(life, known_after_s)
        process.kill()
        self.ledgers[rank].lose_steps()
        self.ledgers[rank].stop()

    def _return_after(self, rank: int, index: int) -> None:
        """Start the worker again at the end of its absence."""
        outage = self._outages[rank][index]
        seconds = outage.until_s - outage.from_s

        def start() -> None:
            ledger = self.ledgers[rank]
            ledger.resume(max((self.ledgers[other].seconds for other in self._alive), default=ledger.seconds))
            self._start(rank)
            self._expect_outage(rank, index + 1)

        if seconds < math.inf:
            self.scheduler.at(self.scheduler.now + seconds, start)


def _from_the_start(outage: object) -> bool:
    return isinstance(outage, Absence) and outage.from_s == 0
