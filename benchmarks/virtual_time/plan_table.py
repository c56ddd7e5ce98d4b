"""The table of the benchmark plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.tables import Table
from benchmarks.virtual_time.plan_cases import CASES, Case

GOAL = 1.10
COLUMNS = [
    *("case", "rank", "candidate", "steps", "predicted s", "measured s", "measured rank", "/ fastest"),
    "value at its end",
]


def add_rows(table: Table, case: Case, found: Mapping[str, Any]) -> float:
    """Add a case to the table; return the seconds of the first choice divided by those of the fastest."""
    if "error" in found:
        table.note(f"{case.name} failed: {' '.join(found['error'].split())[-300:]}")
        return float("inf")
    rows = found["candidates"]
    seconds = [row["measured_s"] if row["steps"] else float("inf") for row in rows]
    best = min(seconds)
    for row, took in zip(rows, seconds, strict=True):
        reached = row["steps"] is not None
        table.row(
            case.name,
            str(row["rank"]),
            row["candidate"],
            f"{row['steps']:.0f}" if reached else "–",
            row["fate"] if row["predicted_s"] is None else f"{row['predicted_s']:.2f}",
            f"{took:.2f}" if reached else "–",
            str(sorted(seconds).index(took) + 1),
            f"{took / best:.2f}" if reached else "–",
            f"{row['value']:.3f}, target {row['target']:g}" if "value" in row else "–",  # of earlier code
        )
    table.note(f"{case.name}: the first choice takes {seconds[0] / best:.3f}x as long as the fastest one")
    return seconds[0] / best


def verdict(ratios: Sequence[float], declared: int) -> str:
    """Say in how many cases the first choice is near the fastest; infinity is a case that failed."""
    near = sum(ratio <= GOAL for ratio in ratios)
    words = f"within 10% of the fastest measured: {near} of {len(ratios)} cases"
    if len(ratios) < declared:
        words += f"; not in this table: {declared - len(ratios)} of {declared}"
    met = "missed" if near < len(ratios) else "met" if len(ratios) == declared else "met so far"
    return f"{words}. The goal (all) is {met}."


def write_table(question: str, kept: Mapping[Case, Mapping[str, Any]]) -> None:
    """Write the table of all kept cases, if there are some."""
    if not kept:
        print("no case is kept: nothing to write")
        return
    table = Table("plan", question, COLUMNS)
    table.verdict = verdict([add_rows(table, case, found) for case, found in kept.items()], len(CASES))
    table.machine = "; ".join(dict.fromkeys(found["machine"] for found in kept.values()))
    for link in dict.fromkeys(found["link"] for found in kept.values() if "link" in found):
        table.note(link)
    if len({found["code"] for found in kept.values()}) > 1:
        table.note("the cases were run by several states of the code")
    print(table.verdict)
    table.write()
