"""Raw results of the benchmark internet: a file for each number of workers, from which its page is written.

Runs of other code or of another machine are not mixed with new ones: they are replaced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.catalog import RESULTS
from benchmarks.support.kept import code_print
from benchmarks.support.raw import RawResults
from benchmarks.virtual_time.internet_runs import Case, cases

FOLDER = RESULTS / "raw" / "internet"


@dataclass(frozen=True)
class Kept:
    """Runs of so many workers on one machine, in the order of the table."""

    workers: int
    machine: str
    found: dict[Case, dict[str, Any]]


def keep(runs: Kept, folder: Path = FOLDER) -> None:
    """Keep these runs, besides those of the same code and machine."""
    raw = RawResults("internet", folder)
    of = {"code": code_print(), "machine": runs.machine, "workers": runs.workers}
    saved = raw.get(_part(runs.workers)) or {}
    own = saved.get("runs", []) if {name: saved.get(name) for name in of} == of else []
    found = {Case(*case): each for case, each in own} | runs.found
    raw.keep(_part(runs.workers), of | {"runs": [[list(case), each] for case, each in found.items()]})


def all_kept(folder: Path = FOLDER) -> list[Kept]:
    """Return all kept runs that the benchmark still has, fewest workers first."""
    runs = []
    for path in folder.glob("*-workers.json"):
        saved = json.loads(path.read_text(encoding="utf-8"))
        found = {Case(*case): each for case, each in saved["runs"]}
        known = [case for case in cases(saved["workers"]) if case in found]
        runs.append(Kept(saved["workers"], saved["machine"], {case: found[case] for case in known}))
    return sorted(runs, key=lambda each: each.workers)


def _part(workers: int) -> str:
    return f"{workers} workers"
