"""The table of the benchmark prediction, from the cases that are kept."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.tables import Table
from benchmarks.virtual_time.prediction_cases import GROUPS, Group

NEAR, FAR = 0.07, 0.15  # within the first in nine of ten cases, beyond the second in none
NEAR_SHARE = 0.9
DECLARED = sum(len(group.methods) for group in GROUPS)
COLUMNS = [
    *("rate", "model", "workers", "strategy", "measured ms per step", "least and greatest"),
    *("predicted ms per step", "predicted / measured", "cores idle", "miss"),
]


def miss(ratio: float) -> str:
    """Say by which bound a prediction misses; "–" if it is near."""
    off = abs(ratio - 1)
    return "**beyond 15%**" if off > FAR else "beyond 7%" if off > NEAR else "–"


def verdict(ratios: Sequence[float | None], declared: int) -> str:
    """Say how many cases are near and how many far; None is a case that failed."""
    near = sum(ratio is not None and abs(ratio - 1) <= NEAR for ratio in ratios)
    far = sum(ratio is not None and abs(ratio - 1) > FAR for ratio in ratios)
    failed = sum(ratio is None for ratio in ratios)
    met = ratios and near >= NEAR_SHARE * len(ratios) and not far and not failed
    goal = "met" if met and len(ratios) == declared else "met so far" if met else "missed"
    words = f"within 7%: {near} of {len(ratios)} cases; beyond 15%: {far}"
    words += f"; failed: {failed}" if failed else ""
    words += f"; not in this table: {declared - len(ratios)} of {declared}" if len(ratios) < declared else ""
    return f"{words}. The goal (nine of ten within 7%, none beyond 15%) is {goal}."


def write_table(
    question: str,
    groups: Sequence[Group],
    kept: Mapping[Group, dict[str, Any] | None],
    variant: str,
    trial: bool = False,
) -> Path | None:
    """Write the table of all kept cases; a trial's is only printed. None: nothing was written."""
    ratios: dict[tuple[Group, str], float | None] = {}
    table = Table("prediction", question, COLUMNS, variant)
    made_on: dict[str, None] = {}
    codes: set[str] = set()
    later: Counter[str] = Counter()  # cases that were run again, beside others that were not
    parts = 1
    for group in groups:
        found = kept[group]
        if found is None:
            continue
        own = [method for method in group.methods if str(method) in found["cases"]]
        if own:
            made_on[found["machine"]] = None
            codes |= {case.get("code", found["code"]) for case in found["cases"].values()}
            if any("code" in case for case in found["cases"].values()):
                later.update(str(method) for method in own if "code" not in found["cases"][str(method)])
            parts = max(parts, found["parts"])
            table.note(f"{group.name}: {found['link']}")
        for method in own:
            case = found["cases"][str(method)]
            place = (group.rate, str(group.model), group.workers, str(method))
            if "error" in case:
                ratios[group, str(method)] = None
                table.row(*place, "–", "–", "–", "–", "–", "**failed**")
                table.note(f"{group.name}: {method} failed: {' '.join(case['error'].split())[-300:]}")
                continue
            runs, predicted = case["measured_s"], case["predicted_s"]
            ratio = predicted / statistics.median(runs)
            ratios[group, str(method)] = ratio
            table.row(
                *place,
                f"{1e3 * statistics.median(runs):.1f}",
                f"{1e3 * min(runs):.1f} to {1e3 * max(runs):.1f}" if len(runs) > 1 else "–",
                f"{1e3 * predicted:.1f}",
                f"{ratio:.3f}",
                f"{statistics.median(case['idle']):.0%}" if "idle" in case else "–",
                miss(ratio),
            )
    if not ratios:
        print("no case is kept: nothing to write")
        return None
    table.machine = "; ".join(made_on)
    table.verdict = verdict(list(ratios.values()), DECLARED)
    table.note(by_strategy(ratios))
    if parts > 1:
        table.note(f"run in {parts} parts, which could run at the same time, each on hosts of its own")
    if any(found and found.get("predicted_by", found["code"]) != found["code"] for found in kept.values()):
        table.note("hosts were calibrated and cases predicted again after the real runs, by later code")
    if later:
        which = ", ".join(f"{count} of {method}" for method, count in later.items())
        table.note(
            f"run again by later code, with calibrations of its own, while the others were kept: {which}"
        )
    if len(codes) > 1:
        table.note(f"the cases were run by {len(codes)} states of the code")
    print(table.verdict)
    return None if trial else table.write()


def by_strategy(ratios: Mapping[tuple[Group, str], float | None]) -> str:
    """Count the near cases of each strategy, the worst first."""
    all_of = Counter(method for _, method in ratios)
    near = Counter(m for (_, m), ratio in ratios.items() if ratio is not None and abs(ratio - 1) <= NEAR)
    order = sorted(all_of, key=lambda method: near[method] / all_of[method])
    return "within 7%: " + ", ".join(f"{method} {near[method]} of {all_of[method]}" for method in order)
