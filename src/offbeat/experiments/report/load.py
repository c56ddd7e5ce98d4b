"""Loading of runs from the folders that `train`, `simulate` and `compare` wrote."""

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
    """Load the runs of a folder, each with the content of its `details.json`, if there is one."""
    summary = _read(folder / "summary.json")
    runs = summary if isinstance(summary, list) else [summary]
    for run in runs:
        if not isinstance(run, dict) or any(name not in run for name in NEEDED):
            raise SettingError(f"{folder / 'summary.json'} is not the summary of an offbeat run")
        details = folder / run.get("folder", "") / "details.json"
        run["details"] = _read(details) if details.exists() else {}
    return runs


def load_all(folders: list[Path]) -> list[Summary]:
    """Load the runs of all folders; they must be of one task, so that one chart can show them."""
    runs = [run for folder in folders for run in load(folder)]
    if not runs:
        raise SettingError(f"no runs in {', '.join(map(str, folders))}")
    kinds = sorted({f"{run['task']} ({run['metric']})" for run in runs})
    if len(kinds) > 1:
        raise SettingError(f"a report covers one task and metric, but these are of {', '.join(kinds)}")
    return runs


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingError(f"{path.parent} holds no {path.name}: give the output folder of a run") from error
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
