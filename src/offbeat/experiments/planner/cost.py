"""The cost of a trial: goodput and money, where workers may be away.

    goodput = B Σ_i (k_i − lost_i) / T          samples per second that count in the model
    money   = price · (N T − unpaid + M T)      until the target

k_i are the steps of worker i until the evaluation at T that reached the target, lost_i those of them that
were never exchanged, because the worker died; B is the batch size. N workers and M machines of servers are
paid by the hour. A machine whose worker died is kept, and paid; one that was preempted is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.core.ledger import WorkerTotals
from offbeat.errors import SettingError
from offbeat.worlds.virtual.cluster import Absence

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Price:
    """The price of a machine for an hour, in any currency."""

    per_hour: float
    before: str = ""  # the currency, if it comes before the number
    after: str = ""

    @classmethod
    def parse(cls, text: str) -> Price:
        """Read 1.2/h, $1.2/h or 1.2 EUR/h."""
        found = re.fullmatch(r"([^\d\s./-]{0,4})\s*(\d+(?:\.\d+)?)\s*([^\d\s./-]{0,4})\s*/\s*h", text.strip())
        if not found or (found[1] and found[3]):
            raise SettingError(f"{text!r}: write a price of a machine for an hour, such as 1.2/h or $1.2/h")
        return cls(float(found[2]), found[1], found[3])

    def of(self, machine_seconds: float) -> float:
        """Return the money that machines cost for so many seconds in all."""
        return self.per_hour * machine_seconds / SECONDS_PER_HOUR

    def write(self, money: float) -> str:
        """Write an amount with three digits, and with the currency if there is one."""
        return f"{self.before}{money:.3g}{' ' if self.after else ''}{self.after}"


def useful_steps(totals: Iterable[WorkerTotals]) -> int:
    """Return the steps of all workers that count in the model."""
    return sum(worker.steps - worker.lost_steps for worker in totals)


def away_seconds(absences: Iterable[Absence], until_s: float) -> float:
    """Return the seconds before `until_s` in which workers are away, summed over workers."""
    return sum(max(0.0, min(away.until_s, until_s) - away.from_s) for away in absences)
