"""offbeat list: the strategies, tasks and preset clusters."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer
from rich.table import Table

from offbeat.cli.terminal import Terminal
from offbeat.experiments.tasks import TASKS
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster, preset_names


def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Show the strategies, tasks and preset clusters, with their settings and defaults."""
    strategies = [_description(cls) for cls in STRATEGIES.values()]
    tasks = [
        {
            **_description(cls),
            "models": list(cls.models),
            "metric": cls.metric,
            "higher_is_better": cls.higher_is_better,
        }
        for cls in TASKS.values()
    ]
    clusters = [{"name": name, "summary": load_cluster(name).summary} for name in preset_names()]
    if as_json:
        listed = {"strategies": strategies, "tasks": tasks, "clusters": clusters}
        typer.echo(json.dumps(listed, indent=1))
        return
    console = Terminal()
    console.print(_table("strategy", strategies))
    console.print(_table("task", tasks))
    presets = Table("cluster", "what it is (for `simulate`)", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for cluster in clusters:
        presets.add_row(f"[bold]{cluster['name']}[/]", cluster["summary"])
    console.print(presets)
    console.say("Tasks read data sets from --data DIR or OFFBEAT_DATA; see `offbeat data`.")
    console.say("Try: offbeat train digits --strategy local_sgd --set period=16 --workers 4")


def _description(cls: Any) -> dict[str, Any]:
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(cls)}
    return {"name": cls.name, "class": cls.__name__, "summary": cls.summary, "settings": defaults}


def _table(what: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(what, "what it does", "settings", box=None, pad_edge=False, padding=(0, 2, 1, 0))
    for row in rows:
        settings = dict(row["settings"])
        if "models" in row:
            settings["model"] = " | ".join(row["models"])
            row["summary"] += (
                f"; {row['metric']}, {'higher' if row['higher_is_better'] else 'lower'} is better"
            )
        shown = "\n".join(f"{key}={value}" for key, value in settings.items())
        table.add_row(f"[bold]{row['name']}[/]", row["summary"], shown or "[dim]none[/]")
    return table
