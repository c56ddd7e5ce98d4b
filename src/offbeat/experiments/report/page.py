"""The report as one HTML file that contains its style, script and data; it needs no network."""

from __future__ import annotations

import html
import json
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from offbeat.core.files import write_atomic
from offbeat.experiments.report.aggregate import RunGroup, grouped, remarks, statistics
from offbeat.experiments.report.load import load_all
from offbeat.experiments.report.verdict import baseline_of, by_time_to_target, losses, verdict, versus
from offbeat.experiments.summary import Summary, json_safe

SHOWN_WORKERS = 32
# A new strategy goes to the end: the colours of the others are known by now.
COLORED = ("bsp", "local_sgd", "diloco", "selsync", "osp", "ssd_sgd", "asp", "ssp", "dssp", "gssp", "oscars")


def write_page(path: Path, folders: list[Path]) -> None:
    """Write the report of the runs in these folders to `path`."""
    write_atomic(path, page(load_all(folders)))


def page(runs: list[Summary]) -> str:
    """Render a report of runs of one task."""
    data = described(runs)
    return _filled("report.html", title=data["title"], data=data)


def live_page() -> str:
    """Render the dashboard of a running job; its data arrives by server-sent events."""
    return _filled("live.html", title="offbeat", data={}, connect="; connect-src 'self'")


def described(runs: list[Summary]) -> dict[str, Any]:
    """Collect the data that the page shows."""
    groups = grouped(runs)
    base = baseline_of(groups)
    first = runs[0]
    seeds = sorted({run["seed"] for run in runs if "seed" in run})
    origins = [run["details"] for run in runs if run.get("details")]
    return {
        "title": f"{first['task']}: {', '.join(dict.fromkeys(run['strategy'] for run in runs))}",
        "task": first["task"],
        "metric": first["metric"],
        "higher_is_better": first.get("higher_is_better", True),
        "target": next((run["target"] for run in runs if run.get("target") is not None), None),
        "facts": _facts(runs, seeds),
        "verdict": verdict(groups),
        "losses": losses(groups),
        "notes": [*dict.fromkeys(n for run in runs for n in run.get("emulated") or []), *remarks(groups)],
        "incomplete": [
            f"{group.label}, seed {run.get('seed')}"
            for group in groups
            for run in group.runs
            if not run.get("complete", True)
        ],
        "groups": [_group(group, base) for group in groups],
        "order": [group.label for group in by_time_to_target(groups)],
        "commands": list(dict.fromkeys(known["command"] for known in origins)),
        "started": min((known["started"] for known in origins), default=None),
        "environments": _distinct([known["environment"] for known in origins]),
    }


def embedded(data: Any) -> str:
    """Write JSON for a <script> of HTML: nothing in it can end the element or begin a comment."""
    text = json.dumps(json_safe(data), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(name: str) -> str:
    """Read a file of the folder `assets`."""
    return files("offbeat.experiments.report").joinpath("assets", name).read_text(encoding="utf-8")


def _filled(template: str, title: str, data: Any, connect: str = "") -> str:
    """Fill the head and the template; data of runs is only embedded as JSON."""
    parts = {
        "title": html.escape(title),
        "connect": connect,
        "style": asset("style.css"),
        "icon": asset("favicon.svg").strip().replace('"', "'").replace("#", "%23"),
        "charts": asset("charts.js"),
        "program": asset(template.replace(".html", ".js")),
        "theme": asset("theme.js"),
        "data": embedded(data),
    }
    before, *rest = (asset("head.html") + asset(template)).split("{{")
    pieces = [before]
    for piece in rest:  # by splitting, not by replacing: the parts may contain braces themselves
        name, _, after = piece.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def color_of(strategy: str) -> int:
    """Return the number of a strategy's colour, the same in every report."""
    known = COLORED.index(strategy) if strategy in COLORED else zlib.crc32(strategy.encode())
    return known % len(COLORED)


def _group(group: RunGroup, base: RunGroup | None) -> dict[str, Any]:
    first = group.runs[0]
    details = first.get("details") or {}
    workers = group.workers()
    return {
        "label": group.label,
        "strategy": first["strategy"],
        "settings": first["settings"],
        "changed": group.changed(),
        "label_settings": group.label_settings,
        "seeds": [run.get("seed") for run in group.runs],
        "steps": first["steps"],
        "figures": statistics(group),
        "versus": versus(group, base).to_json() if base else None,
        "color": color_of(first["strategy"]),
        "curve": group.curve(),
        "runs": [{"seed": run.get("seed"), "history": run["history"]} for run in group.runs],
        "workers": workers[:SHOWN_WORKERS],
        "worker_count": len(workers),
        "staleness": list(group.staleness().items()),
        "decisions": details.get("decisions"),
        "timeline": details.get("timeline"),
    }


def _facts(runs: list[Summary], seeds: list[int]) -> list[tuple[str, str]]:
    """List the facts about all runs; if runs differ, all their values."""

    def values_of(name: str) -> str:
        values = dict.fromkeys(str(run[name]) for run in runs if run.get(name) is not None)
        return ", ".join(values)

    named = [("model", "model"), ("world", "world"), ("cluster", "cluster"), ("workers", "workers")]
    more = [("data order", "order"), ("classes per worker", "skew"), ("data injection", "inject")]
    facts = [(label, values_of(name)) for label, name in (*named, *more)]
    facts += [("target", values_of("target")), ("seeds", ", ".join(map(str, seeds)))]
    return [(label, value) for label, value in facts if value]


def _distinct(values: list[dict[str, str]]) -> list[dict[str, str]]:
    return [value for number, value in enumerate(values) if value not in values[:number]]
