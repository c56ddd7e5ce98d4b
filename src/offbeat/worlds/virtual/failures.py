"""Sources of absences: machines that fail at random, or as a trace says. spot_trace.py has the traces.

    a worker lives for L ~ Exp(mean `mtbf_s`), is away for `rejoin_s`, lives again, …

`rejoin_s` may be a trace: absences last as long as its entries say, one after another. Each worker begins
elsewhere in it, by seed and rank, and after the last entry it begins anew. A cluster's `[churn]` is that.

Lives are drawn by seed and worker alone, so all strategies that are tried with one seed meet the same deaths,
and a longer schedule begins with the shorter one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Absence, Cluster
from offbeat.worlds.virtual.random_numbers import uniform

_LIVES, _TRACE = 1 << 32, 1 << 35  # in the place of a step: numbers of step times stay their own


class AbsenceSource(ABC):
    """Source of the times at which workers are away."""

    paid_away: bool  # whether a machine costs money while its worker is away

    @abstractmethod
    def absences(self, worker: int, seed: int, until_s: float) -> list[Absence]:
        """Return the absences of a worker that begin before `until_s`, in order of time."""

    def applied(self, cluster: Cluster, seed: int, until_s: float, spared: int = 0) -> Cluster:
        """Return the cluster with the absences of all workers but the first `spared`."""
        if cluster.away or cluster.hung or cluster.cut_off or self != (churn_of(cluster) or self):
            raise SettingError(
                "the cluster says itself when workers are away, hung or cut off: leave that out of its file, "
                "or do not ask for failures"
            )
        workers = range(spared, cluster.size)
        away = (absence for worker in workers for absence in self.absences(worker, seed, until_s))
        return replace(cluster, away=tuple(away), churn=None)


@dataclass(frozen=True)
class RandomFailures(AbsenceSource):
    """Deaths at random, after lives of `mtbf_s` on average; by default the machine is kept, and paid for."""

    mtbf_s: float
    rejoin_s: float | tuple[float, ...]
    paid_away: bool = True

    def absences(self, worker: int, seed: int, until_s: float) -> list[Absence]:
        found: list[Absence] = []
        trace = self.rejoin_s if isinstance(self.rejoin_s, tuple) else (self.rejoin_s,)
        first = int(uniform(seed, worker, _TRACE) * len(trace))
        now_s, number = 0.0, 0
        while True:
            now_s += -self.mtbf_s * math.log(uniform(seed, worker, _LIVES + number))
            if now_s >= until_s:
                return found
            returns_s = now_s + trace[(first + number) % len(trace)]
            found.append(Absence(worker=worker, from_s=now_s, until_s=returns_s))
            now_s, number = returns_s, number + 1


def churn_of(cluster: Cluster) -> RandomFailures | None:
    """Return the source of the absences that a cluster's `[churn]` describes. Who is away costs nothing."""
    churn = cluster.churn
    return None if churn is None else RandomFailures(churn.mean_life_s, churn.away_s, paid_away=False)
