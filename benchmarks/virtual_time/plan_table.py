"""The table of the benchmark plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.tables import Table
from benchmarks.virtual_time.plan_cases import CASES, MOST_SEEDS, Case
from benchmarks.virtual_time.prediction_table import FAR, NEAR

GOAL = 1.10
COLUMNS = [
    *("case", "rank", "candidate", "steps", "predicted s", "measured s", "predicted / measured"),
    *("measured rank", "/ fastest", "value at its end"),
]
MISSED, BY_NONE = "missed the target", "target was not reached by any"


@dataclass(frozen=True)
class Outcome:
    """The result of a case: a ratio of seconds where the first choice has reached the target.

    ratio    seconds of the first choice, of those of the fastest; infinite without the target
    reason   why there is no ratio
    """

    ratio: float
    reason: str = ""


def add_rows(table: Table, case: Case, found: Mapping[str, Any]) -> Outcome:
    """Add a case to the table, and return its outcome."""
    if "error" in found:
        table.note(f"{case.name} failed: {' '.join(found['error'].split())[-300:]}")
        return Outcome(math.inf, "failed")
    rows = found["candidates"]
    seconds = [seconds_of(row) if has_reached(row) else math.inf for row in rows]
    best = min(seconds)
    for row, took in zip(rows, seconds, strict=True):
        planned, reached = row["steps"] is not None, took < math.inf
        table.row(
            case.name,
            str(row["rank"]),
            row["candidate"],
            f"{row['steps']:.0f}" if planned else "–",
            row["fate"] if row["predicted_s"] is None else f"{row['predicted_s']:.2f}",
            f"{seconds_of(row):.2f}" if planned else "–",
            "–" if (error := predicted_of_measured(row)) is None else f"{error:.3f}",
            str(sorted(seconds).index(took) + 1) if reached else "**missed**",
            f"{took / best:.2f}" if reached else "–",
            f"{row['value']:.3f}, target {row['target']:g}",
        )
    reason = BY_NONE if best == math.inf else MISSED if seconds[0] == math.inf else ""
    outcome = Outcome(math.inf if reason else seconds[0] / best, reason)
    told = {
        BY_NONE: f"the {BY_NONE} of the candidates measured",
        MISSED: f"the first choice {MISSED}, others reached it",
    }.get(reason, f"the first choice takes {outcome.ratio:.3f}x as long as the fastest one")
    table.note(f"{case.name}: {told}")
    return outcome


def seconds_of(row: Mapping[str, Any]) -> float:
    """Return the measured seconds, without what the first steps took longer, where that is known."""
    return float(row["measured_s"]) - float(row.get("start_s", 0.0))


def has_reached(row: Mapping[str, Any]) -> bool:
    """Return whether a real run met the target at its end; one without planned steps was not to."""
    return row["steps"] is not None and row["value"] >= row["target"]


def predicted_of_measured(row: Mapping[str, Any]) -> float | None:
    """Return the predicted seconds to the planned step, of those measured; None: no step was planned."""
    if row["steps"] is None or row["predicted_s"] is None:
        return None
    return float(row["predicted_s"]) / seconds_of(row)


def verdict(outcomes: Sequence[Outcome], declared: int) -> str:
    """Say in how many cases the first choice is near the fastest, and why it is not in the others."""
    near = sum(outcome.ratio <= GOAL for outcome in outcomes)
    words = f"the first choice is within 10% of the fastest measured in {near} of {len(outcomes)} cases"
    counts = {
        "it missed the target": MISSED,
        "the target was not reached by any": BY_NONE,
        "failed": "failed",
    }
    for told, reason in counts.items():
        if count := sum(outcome.reason == reason for outcome in outcomes):
            words += f"; {told}: {count}"
    if len(outcomes) < declared:
        words += f"; not in this table: {declared - len(outcomes)} of {declared}"
    met = "missed" if near < len(outcomes) else "met" if len(outcomes) == declared else "met so far"
    return f"{words}. The goal (all) is {met}."


def accuracy(found: Sequence[Mapping[str, Any]]) -> str:
    """Say how many predicted seconds are off by how much, of all rows and of the first choices."""
    of_cases = [[predicted_of_measured(row) for row in case["candidates"]] for case in found]
    ratios = [ratio for case in of_cases for ratio in case if ratio is not None]
    first = [case[0] for case in of_cases if case and case[0] is not None]

    def beyond(ratios: Sequence[float], bound: float) -> int:
        return sum(abs(ratio - 1) > bound for ratio in ratios)

    low, high = min(first, default=math.nan), max(first, default=math.nan)
    return (
        f"Predicted seconds are off by more than {NEAR:.0%} in {beyond(ratios, NEAR)} of {len(ratios)} rows, "
        f"by more than {FAR:.0%} in {beyond(ratios, FAR)}; of the {len(first)} first choices "
        f"in {beyond(first, NEAR)} and {beyond(first, FAR)} (predicted / measured {low:.3f} to {high:.3f})."
    )


def scope(found: Sequence[Mapping[str, Any]]) -> str:
    """Say what the table is: how its targets, steps, seeds and candidates were chosen."""
    rows = [row for case in found for row in case["candidates"]]
    targets = [row["target"] for row in rows]
    steps = [row["steps"] for row in rows if row["steps"] is not None]
    measured = [len(case["candidates"]) for case in found]
    return (
        f"Rankings with `--most-seeds {MOST_SEEDS}`; targets of {span(targets, '.2f')}, reached in virtual "
        f"time after {span(steps, '.0f')} steps; {span(measured, 'd')} candidates measured per case, BSP too."
    )


def span(values: Sequence[float], digits: str) -> str:
    """Format the least and the greatest of some values, or the only one."""
    low, high = format(min(values), digits), format(max(values), digits)
    return low if low == high else f"{low} to {high}"


def write_table(question: str, kept: Mapping[Case, Mapping[str, Any]]) -> None:
    """Write the table of all kept cases, if there are some."""
    if not kept:
        print("no case is kept: nothing to write")
        return
    table = Table("plan", question, COLUMNS)
    table.verdict = verdict([add_rows(table, case, found) for case, found in kept.items()], len(CASES))
    if complete := [found for found in kept.values() if "error" not in found]:
        table.verdict += f" {accuracy(complete)} {scope(complete)}"
        old = sum("start_s" not in row for found in complete for row in found["candidates"])
        if old:
            table.note(
                f"{old} rows do not say how much longer the first steps took: their seconds include it"
            )
    table.machine = "; ".join(dict.fromkeys(found["machine"] for found in kept.values()))
    for link in dict.fromkeys(found["link"] for found in kept.values() if "link" in found):
        table.note(link)
    if len({found["code"] for found in kept.values()}) > 1:
        table.note("the cases were run by several states of the code")
    print(table.verdict)
    table.write()
