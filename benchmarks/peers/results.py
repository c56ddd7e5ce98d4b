"""Tables and goals from the cached outcomes, also of a comparison that is not finished."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.peers.cases import CUT, EQUAL, FAILED, REACHED, ROW, SEARCH, Cache, Case, Outcome
from benchmarks.peers.contenders import CONTENDERS, OURS, PEER
from benchmarks.peers.tasks import TASKS
from benchmarks.support.tables import Table

GOAL_TASK = "fashion-mnist/mlp"
GOALS = {"1gbit": 1.2, "200mbit": 1.5}  # speed-up over the best peer
MAX_LOSS = 0.003  # of accuracy, compared with DDP's final one

COLUMNS = ["task", "rate", "workers", "contender", "settings", "s to target", "final", "MB to target"]
MORE = ["steps", "ms per step", "MB in total", "ended"]


def seconds_to_target(outcome: Outcome) -> float:
    """Return the seconds to the target; infinity if it was not reached."""
    peer_task = TASKS[outcome.case.task]
    point = outcome.reached(peer_task.target, peer_task.task.higher_is_better)
    return point.seconds if point else math.inf


def final_value(outcome: Outcome) -> float | None:
    """Return the value of the last evaluation."""
    return outcome.history[-1].value if outcome.history else None


def best_settings(cache: Cache, case: Case) -> Mapping[str, Any]:
    """Return the best settings that a search found for a contender and task.

    Searches at the same rate count, or else at the nearest rate. Without any search: the first settings.
    """
    rates = list(TASKS[case.task].limits_s)
    tried: dict[str, list[Outcome]] = {}
    for outcome in cache:
        other = outcome.case
        if (other.purpose, other.task, other.contender) == (SEARCH, case.task, case.contender):
            tried.setdefault(other.rate, []).append(outcome)
    if not tried:
        return CONTENDERS[case.contender].tries_for(TASKS[case.task].period_divisor)[0]
    at = tried[min(tried, key=lambda rate: abs(rates.index(rate) - rates.index(case.rate)))]
    winner = fastest(merge_seeds(at)) or closest(at) or at[0]  # all may have failed
    return winner.case.settings


def closest(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome that came closest to the target; None if all failed."""
    some = [outcome for outcome in outcomes if outcome.history]

    def miss(outcome: Outcome) -> float:
        target = TASKS[outcome.case.task].target
        return min(abs(point.value - target) for point in outcome.history)

    return min(some, key=miss, default=None)


@dataclass(frozen=True)
class Row:
    """Outcomes of one case with all its seeds."""

    outcomes: tuple[Outcome, ...]

    @property
    def case(self) -> Case:
        return self.outcomes[0].case

    @property
    def seconds(self) -> float:
        """Mean seconds to the target; infinite if one seed missed it."""
        return fmean(map(seconds_to_target, self.outcomes))

    @property
    def shortest_s(self) -> float:
        """Seconds of the shortest training."""
        return min(outcome.history[-1].seconds if outcome.history else 0.0 for outcome in self.outcomes)

    @property
    def final(self) -> float | None:
        """Mean value of the last evaluations."""
        values = [value for value in map(final_value, self.outcomes) if value is not None]
        return fmean(values) if values else None

    def __str__(self) -> str:
        count = len(self.outcomes)
        return f"{self.case.contender} {self.seconds:.1f} s" + (f" (mean of {count} seeds)" * (count > 1))


def fastest(rows: Iterable[Row]) -> Row | None:
    """Return the row with the fewest seconds to the target; None if none reached it."""
    return min((row for row in rows if row.seconds < math.inf), key=lambda row: row.seconds, default=None)


def merge_seeds(outcomes: Iterable[Outcome]) -> list[Row]:
    """Group outcomes that differ by the seed only into rows, in the order of their first seeds."""
    cases: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        cases.setdefault(replace(outcome.case, seed=0).key, []).append(outcome)
    return [Row(tuple(group)) for group in cases.values()]


def _where(case: Case) -> tuple[str, ...]:
    return case.task, case.rate, case.workers, case.contender


def rows(cache: Cache) -> list[Row]:
    """Return the rows of the table, by task, workers, rate and contender.

    Of a contender that ran with several settings, the last settings count.
    """
    names, tasks = list(CONTENDERS), list(TASKS)
    kept = [o for o in cache if o.case.purpose == ROW and o.case.contender in names and o.case.task in tasks]
    last = {_where(o.case): o.case.settings for o in kept}
    kept = [o for o in kept if o.case.settings == last[_where(o.case)]]

    def place(outcome: Outcome) -> tuple[Any, ...]:
        case = outcome.case
        rate = list(TASKS[case.task].limits_s).index(case.rate)
        return tasks.index(case.task), case.workers, rate, names.index(case.contender), case.seed

    return merge_seeds(sorted(kept, key=place))


def cells(row: Row) -> list[str]:
    """Format a row: means over the seeds; the seconds also for each seed."""
    case, peer_task = row.case, TASKS[row.case.task]
    settings = ", ".join(f"{name} {value}" for name, value in case.settings.items())
    ends = "; ".join(dict.fromkeys(map(describe_end, row.outcomes)))
    head = [case.task, case.rate, case.workers, case.contender, settings]
    lasts = [outcome.history[-1] for outcome in row.outcomes if outcome.history]
    if not lasts:
        return [*head, "–", "–", "–", "–", "–", "–", ends]
    points = [o.reached(peer_task.target, peer_task.task.higher_is_better) for o in row.outcomes]
    reached = [point for point in points if point is not None]
    all_reached = len(reached) == len(points)
    each = [f"{point.seconds:.1f}" if point else "not" for point in points]
    by_seed = f" ({', '.join(each)})" if len(points) > 1 else ""
    return [
        *head,
        (f"{row.seconds:.1f}" if all_reached else f"not in {row.shortest_s:.0f}") + by_seed,
        f"{row.final:.4f}",
        f"{fmean(point.nbytes for point in reached) / 1e6:.0f}" if all_reached else "–",
        f"{fmean(last.steps for last in lasts):.0f}",
        f"{fmean(1e3 * last.seconds / max(1, last.steps) for last in lasts):.1f}",
        f"{fmean(last.nbytes for last in lasts) / 1e6:.0f}",
        ends,
    ]


def describe_end(outcome: Outcome) -> str:
    """Describe in words how a case ended."""
    if outcome.ended == CUT:
        return f"cut short at {outcome.limit_s:.0f} s"
    if outcome.ended == FAILED:
        lines = [line.strip() for line in outcome.failure.splitlines() if line.strip()] or ["no output"]
        message = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
        return "failed: " + message.replace("|", "/")
    return {REACHED: "target reached"}.get(outcome.ended, outcome.ended)


@dataclass(frozen=True)
class Goal:
    """Comparison of Offbeat's best strategy with the best peer at one rate."""

    rate: str
    wanted: float
    ours: Row
    peer: Row | None
    ddp_final: float

    @property
    def speedup(self) -> float:
        """How many times sooner our best strategy reaches the target."""
        return math.inf if self.peer is None else self.peer.seconds / self.ours.seconds

    @property
    def loss(self) -> float:
        """How far our final accuracy is below DDP's."""
        return self.ddp_final - (self.ours.final or 0.0)

    @property
    def met(self) -> bool:
        return self.speedup >= self.wanted and self.loss <= MAX_LOSS

    def __str__(self) -> str:
        return (
            f"{self.rate}: {self.ours}, {self.peer or 'no peer reached it'}: {self.speedup:.2f}x sooner"
            f" (goal {self.wanted:g}); final {self.ours.final:.4f} compared with DDP's {self.ddp_final:.4f}"
            f" (goal: at most {MAX_LOSS:g} below): {'met' if self.met else 'missed'}"
        )


def goals(cache: Cache) -> list[Goal]:
    """Return the goals that the rows so far can decide.

    Our best strategy is the fastest one whose final accuracy is good enough. DDP is cut short at slow rates;
    its result does not depend on the rate, so its final accuracy is that of its longest run.
    """
    equal = [row for row in rows(cache) if row.case.task == GOAL_TASK and row.case.workers == EQUAL]
    ddp = [row for row in equal if row.case.contender == "ddp" and row.final is not None]
    if not ddp:
        return []
    ddp_final = max(ddp, key=lambda row: row.outcomes[0].history[-1].steps).final or 0.0
    decided = []
    for rate, wanted in GOALS.items():
        at = [row for row in equal if row.case.rate == rate]
        kinds = {kind: [r for r in at if CONTENDERS[r.case.contender].kind == kind] for kind in (PEER, OURS)}
        good = [row for row in kinds[OURS] if ddp_final - (row.final or 0.0) <= MAX_LOSS]
        ours = fastest(good) or fastest(kinds[OURS])
        if ours is not None:
            decided.append(Goal(rate, wanted, ours, fastest(kinds[PEER]), ddp_final))
    return decided


def tables(cache: Cache, question: str) -> list[Table]:
    """Build the table of rows and the table of searches."""
    built = []
    searched = merge_seeds(outcome for outcome in cache if outcome.case.purpose == SEARCH)
    search_variant = f"{cache.variant}-search" if cache.variant else "search"
    for variant, shown in ((cache.variant, rows(cache)), (search_variant, searched)):
        if shown:
            table = Table("peers", question, [*COLUMNS, *MORE], variant)
            for note in cache.notes if variant == cache.variant else []:
                table.note(note)
            for goal in goals(cache) if variant == cache.variant else []:
                table.note(f"goal at {goal}")
            for row in shown:
                table.row(*cells(row))
            built.append(table)
    return built
