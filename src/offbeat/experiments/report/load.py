"""Folders: the runs that lie in them, as `train`, `simulate` and `compare` left them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbeat.errors import SettingError
from offbeat.experiments.summary import Summary

NEEDED = (
    "strategy",
    "settings",
    "task",
    "metric",
    "workers",
    "seconds",
    "bytes_sent",
    "per_worker",
    "history",
)


def load(folder: Path) -> list[Summary]:
    """The runs of a folder, each with what `details.json` beside its summary knows, if it is there."""
    known = _read(folder / "summary.json")
    runs = known if isinstance(known, list) else [known]
    for run in runs:
        if not isinstance(run, dict) or any(name not in run for name in NEEDED):
            raise SettingError(f"{folder / 'summary.json'} is not the summary of an offbeat run")
        details = folder / run.get("folder", "") / "details.json"
        run["details"] = _read(details) if details.exists() else {}
    return runs


def load_all(folders: list[Path]) -> list[Summary]:
    """The runs of all folders; they must be of one task, or no chart could hold them."""
    runs = [run for folder in folders for run in load(folder)]
    if not runs:
        raise SettingError(f"no runs in {', '.join(map(str, folders))}")
    kinds = sorted({f"{run['task']} ({run['metric']})" for run in runs})
    if len(kinds) > 1:
        raise SettingError(f"a report is of one task and metric, but these are of {', '.join(kinds)}")
    return runs


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise SettingError(f"{path.parent} holds no {path.name}: give the --out of a run") from problem
    except (OSError, ValueError) as problem:
        raise SettingError(f"{path} cannot be read: {problem}") from problem
