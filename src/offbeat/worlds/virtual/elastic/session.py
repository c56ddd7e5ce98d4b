"""Session of an elastic worker in virtual time: it joins those who train, and takes over their state."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from offbeat.core.elastic_session import ElasticSession
from offbeat.core.membership import NotAdmitted, Registry
from offbeat.core.port import CollectivePort, Lane
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.computing import Core
from offbeat.worlds.virtual.cuda_graphs import Gradient
from offbeat.worlds.virtual.elastic.life import Life
from offbeat.worlds.virtual.elastic.looking import ElasticLookout, Readings
from offbeat.worlds.virtual.elastic.port import VirtualRosterPort
from offbeat.worlds.virtual.looking import Look
from offbeat.worlds.virtual.session import VirtualSession


class ElasticVirtualSession(VirtualSession):
    """One process of an elastic worker."""

    port: VirtualRosterPort
    _session: ElasticSession[Any]

    def __init__(
        self,
        life: Life,
        founds: bool,
        port: VirtualRosterPort,
        registry: Registry,
        everyone: Readings,
        evaluations: ElasticLookout,
        model: nn.Module,
        optimizers: list[Optimizer],
        strategy: Strategy[Any],
        gradient: Gradient,
        cluster: Cluster,
        **options: Any,
    ) -> None:
        self._life = life
        self.founds = founds
        self._roster_port = port
        self._registry = registry
        self._everyone = everyone
        self._evaluations = evaluations
        alone = {lane: CollectiveQueue(lane, life.scheduler, [], 1) for lane in Lane}  # until it has joined
        super().__init__(
            life.rank,
            model,
            optimizers,
            strategy,
            gradient,
            cluster,
            alone,
            None,
            ledger=port.ledger,
            **options,
        )
        self._scheduler = life
        self.core = Core(life, life.rank)
        self._absences = ()  # a process that dies does not know of it

    def _make_port(self, collectives: dict[Lane, CollectiveQueue]) -> CollectivePort:
        return self._roster_port

    def _make_session(self, strategy: Strategy[Any], replica: Replica) -> Session[Any]:
        return ElasticSession(strategy, replica, self._roster_port, self._registry)

    @property
    def clock(self) -> int:
        """Steps of the training so far, with those before this worker joined."""
        return self._session.clock

    async def start(self) -> None:
        """Join the others. For founders no time counts; a newcomer gets the state over the network."""
        if self.founds:
            with self.ledger.paused():
                await self._session.broadcast()
        else:
            self.ledger.start()
            asked_s = self._life.now
            try:
                await self._session.broadcast()
            except NotAdmitted:  # it has waited all the same
                self.ledger.waited(self._life.now - asked_s)
                raise
            self.ledger.waited(self._life.now - asked_s)
        self._step = self.clock

    async def look(self, look: Look, *, alone: bool = False, wait: bool = False) -> None:
        """Evaluate the model that the roster publishes now: every worker calls `look`, for any may die.

        It takes no time and changes nothing: each trains on at once, and `look` is called when the last has
        come; with `wait`, this method returns after that.
        """
        roster = self._roster_port.member.roster
        seen = self._evaluations.look(self._life, roster, self.clock, self._session, self._everyone, look)
        if wait:
            with self.ledger.paused():
                await seen
