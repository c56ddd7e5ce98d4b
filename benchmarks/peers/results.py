"""From the cache to tables and to the goals; at any time, also of a run that is not done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.peers.cases import CUT, EQUAL, FAILED, REACHED, ROW, SEARCH, Cache, Case, Outcome
from benchmarks.peers.contenders import CONTENDERS, OURS, PEER
from benchmarks.peers.setting import SETTINGS
from benchmarks.tables import Table

GOAL_TASK = "fashion-mnist/mlp"
GOALS = {"1gbit": 1.2, "200mbit": 1.5}  # how many times sooner than the best peer
MAY_LOSE = 0.003  # of DDP's final accuracy

COLUMNS = ["task", "rate", "workers", "contender", "settings", "s to target", "final", "MB to target"]
MORE = ["steps", "ms a step", "MB in all", "ended"]


def seconds(outcome: Outcome) -> float:
    """To the target; infinite, where it was not reached."""
    setting = SETTINGS[outcome.case.task]
    look = outcome.reached(setting.target, setting.task.higher_is_better)
    return look.seconds if look else math.inf


def final(outcome: Outcome) -> float | None:
    return outcome.history[-1].value if outcome.history else None


def found(cache: Cache, case: Case) -> Mapping[str, Any]:
    """The settings that a search has found for this contender and task at this rate, else at the rate nearest
    to it; the first ones, if none has."""
    rates = list(SETTINGS[case.task].limits_s)
    tried: dict[str, list[Outcome]] = {}
    for outcome in cache:
        of = outcome.case
        if (of.purpose, of.task, of.contender) == (SEARCH, case.task, case.contender):
            tried.setdefault(of.rate, []).append(outcome)
    if not tried:
        return CONTENDERS[case.contender].tries_at(SETTINGS[case.task].shorter)[0]
    at = tried[min(tried, key=lambda rate: abs(rates.index(rate) - rates.index(case.rate)))]
    winner = soonest(merged(at)) or nearest(at) or at[0]  # all may have failed
    return winner.case.settings


def nearest(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Of those that did not get there: the one that came nearest."""
    some = [outcome for outcome in outcomes if outcome.history]

    def miss(outcome: Outcome) -> float:
        setting = SETTINGS[outcome.case.task]
        return min(abs(look.value - setting.target) for look in outcome.history)

    return min(some, key=miss, default=None)


@dataclass(frozen=True)
class Row:
    """What came of one case, over all the seeds with which it ran."""

    outcomes: tuple[Outcome, ...]

    @property
    def case(self) -> Case:
        return self.outcomes[0].case

    @property
    def seconds(self) -> float:
        """To the target, in the mean; infinite, where it was not reached once."""
        return fmean(map(seconds, self.outcomes))

    @property
    def until(self) -> float:
        """Seconds of the shortest run, all in all."""
        return min(outcome.history[-1].seconds if outcome.history else 0.0 for outcome in self.outcomes)

    @property
    def final(self) -> float | None:
        values = [value for value in map(final, self.outcomes) if value is not None]
        return fmean(values) if values else None

    def __str__(self) -> str:
        count = len(self.outcomes)
        return f"{self.case.contender} {self.seconds:.1f} s" + (f" (mean of {count} seeds)" * (count > 1))


def soonest(rows: Iterable[Row]) -> Row | None:
    """None, where nobody was at the target."""
    return min((row for row in rows if row.seconds < math.inf), key=lambda row: row.seconds, default=None)


def merged(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row for all seeds, in the order of the first ones."""
    cases: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        cases.setdefault(replace(outcome.case, seed=0).key, []).append(outcome)
    return [Row(tuple(those)) for those in cases.values()]


def _where(case: Case) -> tuple[str, ...]:
    return case.task, case.rate, case.workers, case.contender


def rows(cache: Cache) -> list[Row]:
    """In the order of the tables: by task, workers and rate, contenders as in their table. Of a contender
    that ran with several settings in one place, those count with which it ran last."""
    names, tasks = list(CONTENDERS), list(SETTINGS)
    kept = [o for o in cache if o.case.purpose == ROW and o.case.contender in names and o.case.task in tasks]
    last = {_where(o.case): o.case.settings for o in kept}
    kept = [o for o in kept if o.case.settings == last[_where(o.case)]]

    def place(outcome: Outcome) -> tuple[Any, ...]:
        case = outcome.case
        rate = list(SETTINGS[case.task].limits_s).index(case.rate)
        return tasks.index(case.task), case.workers, rate, names.index(case.contender), case.seed

    return merged(sorted(kept, key=place))


def cells(row: Row) -> list[str]:
    """Of several seeds, the means; for the seconds also those of each."""
    case, setting = row.case, SETTINGS[row.case.task]
    settings = ", ".join(f"{name} {value}" for name, value in case.settings.items())
    ends = "; ".join(dict.fromkeys(map(words, row.outcomes)))
    head = [case.task, case.rate, case.workers, case.contender, settings]
    lasts = [outcome.history[-1] for outcome in row.outcomes if outcome.history]
    if not lasts:
        return [*head, "–", "–", "–", "–", "–", "–", ends]
    looks = [o.reached(setting.target, setting.task.higher_is_better) for o in row.outcomes]
    there = [look for look in looks if look is not None]
    all_there = len(there) == len(looks)
    each = [f"{look.seconds:.1f}" if look else "not" for look in looks]
    several = f" ({', '.join(each)})" if len(looks) > 1 else ""
    return [
        *head,
        (f"{row.seconds:.1f}" if all_there else f"not in {row.until:.0f}") + several,
        f"{row.final:.4f}",
        f"{fmean(look.nbytes for look in there) / 1e6:.0f}" if all_there else "–",
        f"{fmean(last.steps for last in lasts):.0f}",
        f"{fmean(1e3 * last.seconds / max(1, last.steps) for last in lasts):.1f}",
        f"{fmean(last.nbytes for last in lasts) / 1e6:.0f}",
        ends,
    ]


def words(outcome: Outcome) -> str:
    if outcome.ended == CUT:
        return f"cut short at {outcome.limit_s:.0f} s"
    if outcome.ended == FAILED:
        lines = [line.strip() for line in outcome.failure.splitlines() if line.strip()] or ["no word"]
        said = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
        return "failed: " + said.replace("|", "/")
    return {REACHED: "target reached"}.get(outcome.ended, outcome.ended)


@dataclass(frozen=True)
class Goal:
    """How the best strategy here stands against the best peer, at one rate."""

    rate: str
    wanted: float
    ours: Row
    peer: Row | None
    ddp_final: float

    @property
    def sooner(self) -> float:
        return math.inf if self.peer is None else self.peer.seconds / self.ours.seconds

    @property
    def lost(self) -> float:
        """Of DDP's final accuracy."""
        return self.ddp_final - (self.ours.final or 0.0)

    @property
    def met(self) -> bool:
        return self.sooner >= self.wanted and self.lost <= MAY_LOSE

    def __str__(self) -> str:
        return (
            f"{self.rate}: {self.ours}, {self.peer or 'no peer got there'}: {self.sooner:.2f} times sooner"
            f" (goal {self.wanted:g}); final {self.ours.final:.4f} against DDP's {self.ddp_final:.4f}"
            f" (goal: not below by more than {MAY_LOSE:g}): {'met' if self.met else 'missed'}"
        )


def goals(cache: Cache) -> list[Goal]:
    """Those that the rows so far can tell. Of ours, the soonest whose final accuracy is good enough.

    DDP is cut short at slow rates. What it computes does not depend on the rate, so its final accuracy is
    that of whichever run of it went furthest.
    """
    there = [row for row in rows(cache) if row.case.task == GOAL_TASK and row.case.workers == EQUAL]
    ddp = [row for row in there if row.case.contender == "ddp" and row.final is not None]
    if not ddp:
        return []
    ddp_final = max(ddp, key=lambda row: row.outcomes[0].history[-1].steps).final or 0.0
    told = []
    for rate, wanted in GOALS.items():
        at = [row for row in there if row.case.rate == rate]
        kinds = {kind: [r for r in at if CONTENDERS[r.case.contender].kind == kind] for kind in (PEER, OURS)}
        good = [row for row in kinds[OURS] if ddp_final - (row.final or 0.0) <= MAY_LOSE]
        ours = soonest(good) or soonest(kinds[OURS])
        if ours is not None:
            told.append(Goal(rate, wanted, ours, soonest(kinds[PEER]), ddp_final))
    return told


def tables(cache: Cache, question: str) -> list[Table]:
    made = []
    searched = merged(outcome for outcome in cache if outcome.case.purpose == SEARCH)
    for name, those in ((cache.name, rows(cache)), (f"{cache.name}-search", searched)):
        if those:
            table = Table(name, question, [*COLUMNS, *MORE])
            for note in cache.notes if name == cache.name else []:
                table.note(note)
            for goal in goals(cache) if name == cache.name else []:
                table.note(f"goal at {goal}")
            for row in those:
                table.row(*cells(row))
            made.append(table)
    return made
