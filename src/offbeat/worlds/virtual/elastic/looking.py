"""Evaluations of elastic workers in virtual time: exchanges that take no time, beside those of training.

A worker that comes to an evaluation leaves a copy of what it publishes, and trains on at once. When the last
of its roster has come, all who have come and still live look at the model of that step. Nobody waits for a
worker that dies before, or is dropped. So an evaluation neither finds a death nor lets a newcomer in, and a
run is the same, to the last bit, however often it is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.port import Lane
from offbeat.core.roster import Roster
from offbeat.core.session import Session, wait_for_all
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.elastic.life import Life, Lives
from offbeat.worlds.virtual.looking import Look, shown
from offbeat.worlds.virtual.port import VirtualPort
from offbeat.worlds.virtual.scheduler import Event, Scheduler


class Readings:
    """The totals of all workers as they are now."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers

    def totals_of(self, rank: int) -> WorkerTotals:
        return self._ledgers[rank].totals()

    def totals(self) -> list[WorkerTotals]:
        return [ledger.totals() for ledger in self._ledgers]


class LookPort(VirtualPort):
    """Port of one worker to one evaluation."""

    elastic = True


@dataclass
class RosterEvaluation:
    """An evaluation of one step that not all workers have come to."""

    names: tuple[str, ...]  # of the roster of the worker that came first, by place
    queue: CollectiveQueue
    totals: dict[int, WorkerTotals]  # by rank, in order
    to_come: set[str]
    ledgers: list[Ledger] = field(default_factory=list)  # by place; what they are told does not count

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each worker in the roster, by name."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def all_totals(self) -> list[WorkerTotals]:
        """The totals of all workers once all have come: one list, for all who look."""
        return list(self.totals.values())

    def skip(self, name: str) -> None:
        """Wait no longer for this worker; what it has left if it has come stays."""
        if name in self.to_come:
            self.to_come.remove(name)
            self.queue.remove_worker(self.places[name])


class ElasticLookout:
    """The evaluations that some workers have come to, and others have not."""

    def __init__(self, scheduler: Scheduler, lives: Lives) -> None:
        self._scheduler = scheduler
        self._lives = lives
        self._roster = Roster(0, ())  # the newest with which a worker has come
        self._open: dict[int, RosterEvaluation] = {}  # by step, in order
        self._closed = 0  # the last step whose evaluation all have come to

    def look(
        self,
        life: Life,
        roster: Roster,
        clock: int,
        session: Session[Any],
        everyone: Readings,
        look: Look,
    ) -> Event[None]:
        """Show `look` the model of this step once all have come; return the event of that.

        `clock` is the step, and `everyone` has the totals of all workers now.
        """
        seen: Event[None] = Event(
            self._scheduler, self._uncounted(life.rank), lambda: f"the evaluation of step {clock}"
        )
        self._take(roster)
        evaluation = self._evaluation(life, clock, everyone)
        if evaluation is None:  # the others have dropped this worker, which does not know yet
            seen.succeed(None)
            return seen
        evaluation.totals[life.rank] = everyone.totals_of(life.rank)
        place = evaluation.places[life.name]
        port = LookPort(place, dict.fromkeys(Lane, evaluation.queue), evaluation.ledgers[place])

        async def show() -> None:
            model = await session.conductor.publish(port, while_training=True)
            await wait_for_all(port, session.replica.weights[0].device)
            if not life.dead:
                with shown(model, session):
                    look(evaluation.all_totals)
                seen.succeed(None)

        self._scheduler.start(f"evaluation of step {clock} by {life.name}", show())
        evaluation.to_come.remove(life.name)
        self._close()
        return seen

    def remove(self, life: Life) -> None:
        """Let no evaluation wait for a worker that has ended."""
        for evaluation in list(self._open.values()):
            evaluation.skip(life.name)
        self._close()

    def _take(self, roster: Roster) -> None:
        """Let no evaluation wait for workers that are not in the newest roster."""
        if roster.epoch <= self._roster.epoch:
            return
        self._roster = roster
        for evaluation in self._open.values():
            for name in evaluation.to_come.difference(roster.everyone):
                evaluation.skip(name)
        self._close()

    def _close(self) -> None:
        for step in [step for step, evaluation in self._open.items() if not evaluation.to_come]:
            del self._open[step]
            self._closed = max(self._closed, step)

    def _evaluation(self, life: Life, clock: int, everyone: Readings) -> RosterEvaluation | None:
        """Return the evaluation of this step; None if the others look without this worker."""
        if clock not in self._open and clock > self._closed and life.name in self._roster.ranks:
            self._open[clock] = self._new(everyone)
        evaluation = self._open.get(clock)
        return evaluation if evaluation is not None and life.name in evaluation.to_come else None

    def _new(self, everyone: Readings) -> RosterEvaluation:
        names = self._roster.everyone
        ledgers = [self._uncounted(place) for place in range(len(names))]
        queue = CollectiveQueue(Lane.FRONT, self._scheduler, ledgers, len(names))
        totals = {each.rank: each for each in everyone.totals()}
        evaluation = RosterEvaluation(names, queue, totals, set(names), ledgers)
        for name in names:
            if self._lives.by_name[name].dead:
                evaluation.skip(name)
        return evaluation

    def _uncounted(self, rank: int) -> Ledger:
        ledger = Ledger(rank, self._scheduler.clock)
        ledger.stop()
        return ledger
