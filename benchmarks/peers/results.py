"""From the cache to tables and to the goals; at any time, also of a run that is not done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


def best(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The first at the target; None, where nobody was."""
    there = [outcome for outcome in outcomes if seconds(outcome) < math.inf]
    return min(there, key=seconds, default=None)


def found(cache: Cache, case: Case) -> Mapping[str, Any]:
    """The settings that a search has found for this contender, at this rate; the first ones, if none has."""
    tried = [
        outcome
        for outcome in cache
        if outcome.case.purpose == SEARCH
        and (outcome.case.contender, outcome.case.rate) == (case.contender, case.rate)
    ]
    winner = best(tried) or nearest(tried)
    return winner.case.settings if winner else CONTENDERS[case.contender].tries[0]


def nearest(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Of those that did not get there: the one that came nearest."""
    some = [outcome for outcome in outcomes if outcome.history]

    def miss(outcome: Outcome) -> float:
        setting = SETTINGS[outcome.case.task]
        return min(abs(look.value - setting.target) for look in outcome.history)

    return min(some, key=miss, default=None)


def rows(cache: Cache) -> list[Outcome]:
    """In the order of the tables: by task, workers and rate, contenders as in their table."""
    names, tasks = list(CONTENDERS), list(SETTINGS)
    kept = [o for o in cache if o.case.purpose == ROW and o.case.contender in names and o.case.task in tasks]

    def place(outcome: Outcome) -> tuple[Any, ...]:
        case = outcome.case
        rate = list(SETTINGS[case.task].limits_s).index(case.rate)
        return tasks.index(case.task), case.workers, rate, names.index(case.contender), case.seed

    return sorted(kept, key=place)


def cells(outcome: Outcome) -> list[str]:
    case, setting = outcome.case, SETTINGS[outcome.case.task]
    settings = ", ".join(f"{name} {value}" for name, value in case.settings.items())
    head = [case.task, case.rate, case.workers, case.contender, settings]
    if not outcome.history:
        return [*head, "–", "–", "–", "–", "–", "–", words(outcome)]
    last = outcome.history[-1]
    there = outcome.reached(setting.target, setting.task.higher_is_better)
    return [
        *head,
        f"{there.seconds:.1f}" if there else f"not in {last.seconds:.0f}",
        f"{last.value:.4f}",
        f"{there.nbytes / 1e6:.0f}" if there else "–",
        str(last.steps),
        f"{1e3 * last.seconds / max(1, last.steps):.1f}",
        f"{last.nbytes / 1e6:.0f}",
        words(outcome),
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
    ours: Outcome
    peer: Outcome | None
    ddp_final: float

    @property
    def sooner(self) -> float:
        return math.inf if self.peer is None else seconds(self.peer) / seconds(self.ours)

    @property
    def lost(self) -> float:
        """Of DDP's final accuracy."""
        return self.ddp_final - (final(self.ours) or 0.0)

    @property
    def met(self) -> bool:
        return self.sooner >= self.wanted and self.lost <= MAY_LOSE

    def __str__(self) -> str:
        peer = f"{self.peer.case.contender} {seconds(self.peer):.1f} s" if self.peer else "no peer got there"
        ours = f"{self.ours.case.contender} {seconds(self.ours):.1f} s"
        return (
            f"{self.rate}: {ours}, {peer}: {self.sooner:.2f} times sooner"
            f" (goal {self.wanted:g}); final {final(self.ours):.4f} against DDP's {self.ddp_final:.4f}"
            f" (goal: not below by more than {MAY_LOSE:g}): {'met' if self.met else 'missed'}"
        )


def goals(cache: Cache) -> list[Goal]:
    """Those that the rows so far can tell. Of ours, the soonest whose final accuracy is good enough.

    DDP is cut short at slow rates. What it computes does not depend on the rate, so its final accuracy is
    that of whichever run of it went furthest.
    """
    there = [o for o in rows(cache) if o.case.task == GOAL_TASK and o.case.workers == EQUAL]
    ddp = [outcome for outcome in there if outcome.case.contender == "ddp" and outcome.history]
    if not ddp:
        return []
    ddp_final = final(max(ddp, key=lambda outcome: outcome.history[-1].steps)) or 0.0
    told = []
    for rate, wanted in GOALS.items():
        at = [outcome for outcome in there if outcome.case.rate == rate]
        kinds = {kind: [o for o in at if CONTENDERS[o.case.contender].kind == kind] for kind in (PEER, OURS)}
        good = [outcome for outcome in kinds[OURS] if ddp_final - (final(outcome) or 0.0) <= MAY_LOSE]
        ours = best(good) or best(kinds[OURS])
        if ours is not None:
            told.append(Goal(rate, wanted, ours, best(kinds[PEER]), ddp_final))
    return told


def tables(cache: Cache, question: str) -> list[Table]:
    made = []
    wanted = [("peers", rows(cache)), ("peers-search", [o for o in cache if o.case.purpose == SEARCH])]
    for name, outcomes in wanted:
        if outcomes:
            table = Table(name, question, [*COLUMNS, *MORE])
            for note in cache.notes if name == "peers" else []:
                table.note(note)
            for goal in goals(cache) if name == "peers" else []:
                table.note(f"goal at {goal}")
            for outcome in outcomes:
                table.row(*cells(outcome))
            made.append(table)
    return made
