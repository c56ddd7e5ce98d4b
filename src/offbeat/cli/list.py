"""offbeat list: the strategies, tasks and preset clusters."""

from __future__ import annotations

import json
from dataclasses import MISSING
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from offbeat.cli.terminal import Terminal
from offbeat.core.settings import schema
from offbeat.core.strategy import Strategy
from offbeat.experiments.tasks import TASKS, Task
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


def _description(cls: type[Strategy[Any]] | type[Task]) -> dict[str, Any]:
    declared = schema(cls).values()
    return {
        "name": cls.name,
        "class": cls.__name__,
        "summary": cls.summary,
        "settings": {d.attribute: None if d.default is MISSING else d.default for d in declared},
        "meanings": {d.attribute: d.field.help for d in declared},
    }


def _table(what: str, rows: list[dict[str, Any]]) -> Table:
    """Tabulate names with their summaries, then a line for each setting and its meaning."""
    table = Table(what, "what it does, and its settings", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        settings, summary = dict(row["settings"]), row["summary"]
        if "models" in row:
            settings["model"] = " | ".join(row["models"])
            better = "higher" if row["higher_is_better"] else "lower"
            summary += f"; {row['metric']}, {better} is better"
        table.add_row(f"[bold]{row['name']}[/]", summary)
        for key, value in settings.items():
            table.add_row(f"  {key}={value}", f"[dim]{escape(row['meanings'][key])}[/]")
        table.add_row()
    return table
