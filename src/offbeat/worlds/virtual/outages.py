"""Outages: when workers are slow, away, hung or cut off, and how soon the others find out."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from offbeat.core.fields import FieldError, ListOf, Number, Whole
from offbeat.core.membership import BEAT_S, NEWS_S, SILENT_LOOKS
from offbeat.core.settings import Settings
from offbeat.worlds.virtual.step_times import Positive, PositiveSeconds, SecondsList

MOST_WORKERS = 1_000_000
_RANK = Whole(wording="a worker's number, counted from 0", at_least=0, at_most=MOST_WORKERS)
Seconds = Annotated[float, Number(noun="a number of seconds", at_least=0)]
LaterSeconds = Annotated[float, Number(noun="a number of seconds", above=0, infinite=True)]
Ranks = Annotated[tuple[int, ...], ListOf(item=_RANK, noun="a list of workers' numbers, not empty")]


class _Period(Settings):
    """A period of time from `from_s` until `until_s`."""

    from_s: Seconds
    until_s: LaterSeconds

    def check(self) -> None:
        if self.until_s <= self.from_s:
            raise FieldError(
                ("until_s",), f"expected a time after from_s = {self.from_s!r}, not {self.until_s!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Slowdown(_Period):
    """`[[slow]]`: steps that these workers begin in this period take `factor` times as long."""

    workers: Ranks
    factor: Positive
    from_s: Seconds = 0.0
    until_s: LaterSeconds = math.inf


@dataclass(frozen=True, kw_only=True)
class Absence(_Period):
    """`[[away]]`: a worker leaves at `from_s`, and returns at `until_s`, if that is given.

    In an elastic run its process dies at `from_s`, which a launcher sees, and is started again at `until_s`.
    """

    word: ClassVar[str] = "away"
    worker: Annotated[int, _RANK]
    from_s: Seconds
    until_s: LaterSeconds = math.inf


@dataclass(frozen=True, kw_only=True)
class Hang(_Period):
    """`[[hung]]`: a worker's process is stopped at `from_s`, and continues at `until_s`, if that is given."""

    word: ClassVar[str] = "hung"
    worker: Annotated[int, _RANK]
    from_s: Seconds
    until_s: LaterSeconds = math.inf


@dataclass(frozen=True, kw_only=True)
class Cut(_Period):
    """`[[cut_off]]`: these workers compute, but reach neither the other workers nor the store."""

    word: ClassVar[str] = "cut off"
    workers: Ranks
    from_s: Seconds
    until_s: LaterSeconds = math.inf


@dataclass(frozen=True, kw_only=True)
class Churn(Settings):
    """`[churn]`: machines that come and go: a worker lives for a random time, and is away as a trace says.

    Each worker begins elsewhere in the trace, which begins anew after its last entry (failures.py).
    """

    mean_life_s: PositiveSeconds
    away_s: SecondsList  # how long absences last, one after another


@dataclass(frozen=True, kw_only=True)
class ElasticTimes(Settings):
    """`[elastic]`: how soon an elastic run finds out who is lost, and how long new connections take."""

    death_s: Seconds = NEWS_S  # from a death that a launcher sees until the others know
    silence_s: Seconds = BEAT_S * SILENT_LOOKS  # without a heartbeat until a worker is lost
    connect_s: Seconds = 0.1  # to connect all workers of a roster
    timeout_s: Annotated[float, Number(noun="a number of seconds", above=0)] = 300.0  # for one exchange


Outage = Absence | Hang | Cut


def by_worker(outages: Iterable[Outage]) -> dict[int, list[Outage]]:
    """Return the outages of each worker that has any, in order of time."""
    of: dict[int, list[Outage]] = {}
    for outage in sorted(outages, key=lambda outage: outage.from_s):
        for worker in dict.fromkeys(outage.workers if isinstance(outage, Cut) else (outage.worker,)):
            of.setdefault(worker, []).append(outage)
    return of
