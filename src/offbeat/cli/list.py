"""offbeat list: show the strategies, codecs, tasks and preset clusters, and plugins that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import MISSING
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from offbeat.cli.terminal import Terminal
from offbeat.core.settings import Declared, nearest, schema
from offbeat.errors import SettingError

if TYPE_CHECKING:
    from offbeat.codecs import Codec
    from offbeat.core.plugins import Catalog
    from offbeat.core.strategy import Strategy
    from offbeat.experiments.tasks import Task

COMMON = 3  # a setting of at least this many entries is explained only once


def list_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show this one only; without it, all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Show the strategies, codecs, tasks and preset clusters, with their settings and defaults.

    Those of installed plugins follow ours; a plugin that cannot be used is shown with the reason.
    """
    from offbeat.codecs import CODECS
    from offbeat.experiments.tasks import TASKS
    from offbeat.strategies import STRATEGIES
    from offbeat.worlds.virtual.cluster import load_cluster, preset_names

    refused: list[dict[str, str]] = []
    strategies = _descriptions(STRATEGIES, refused)
    codecs = _descriptions(CODECS, refused)
    tasks = _descriptions(TASKS, refused)
    clusters = [{"name": each, "summary": load_cluster(each).summary} for each in preset_names()]
    if name is not None:
        kinds = [strategies, codecs, tasks, clusters] = [
            [entry for entry in entries if name.lower() in (entry["name"], entry.get("class", "").lower())]
            for entries in (strategies, codecs, tasks, clusters)
        ]
        if not any(kinds):
            known = [*STRATEGIES, *CODECS, *TASKS, *preset_names()]
            raise SettingError(f"nothing is named {name!r}{nearest(name, known)}")
    if as_json:
        listed = {"strategies": strategies, "codecs": codecs, "tasks": tasks, "clusters": clusters}
        typer.echo(json.dumps({**listed, "refused": refused}, indent=1))
        return
    console = Terminal()
    _show(console, "strategies", "--strategy NAME; a setting: --set KEY=VALUE", strategies)
    _show(console, "codecs", "a setting of strategies: --set codec='NAME(…)'", codecs)
    _show(console, "tasks", "the first argument; options: --model, --batch-size, --epochs, --lr", tasks)
    if clusters:
        console.print("[bold underline]clusters[/]  --cluster NAME, or the path of a TOML file\n")
    for cluster in clusters:
        _show_entry(console, cluster, max(len(each["name"]) for each in clusters))
    if name is not None:
        return
    console.print()
    for plugin in refused:
        console.warn(plugin["reason"])
    console.tell("Tasks read data sets from --data DIR or OFFBEAT_DATA; see `offbeat data`.")
    console.say("Try: offbeat train digits --strategy local_sgd --set period=16 --workers 4")


def _descriptions(
    catalog: Catalog[Strategy[Any]] | Catalog[Codec] | Catalog[Task], refused: list[dict[str, str]]
) -> list[dict[str, Any]]:
    """Describe all classes of a catalog; add the plugins that cannot be used to `refused`."""
    classes, reasons = catalog.load()
    refused += [{"what": catalog.what, "name": name, "reason": reasons[name]} for name in reasons]
    return [_description(cls) | {"package": catalog.package_of(name)} for name, cls in classes.items()]


def _description(cls: type[Strategy[Any]] | type[Codec] | type[Task]) -> dict[str, Any]:
    from offbeat.experiments.tasks import Task

    declared = schema(cls).values()
    description: dict[str, Any] = {
        "name": cls.name,
        "class": cls.__name__,
        "summary": cls.summary,
        "settings": {d.attribute: _default(d) for d in declared},
        "required": [d.attribute for d in declared if d.default is MISSING],
        "meanings": {d.attribute: d.field.help for d in declared},
    }
    if issubclass(cls, Task):
        description["models"] = list(cls.models)
        description |= {"metric": cls.metric, "higher_is_better": cls.higher_is_better}
    return description


def _default(declared: Declared) -> Any:
    return None if declared.default is MISSING else declared.field.plain(declared.default)


def _show(console: Terminal, heading: str, usage: str, entries: list[dict[str, Any]]) -> None:
    """Print what each entry does, and its settings: key, default and meaning.

    A setting of several entries is explained once, before them.
    """
    if not entries:
        return
    uses = Counter(setting for entry in entries for setting in entry["meanings"].items())
    common = dict(setting for setting, count in uses.items() if count >= COMMON)
    console.print(f"[bold underline]{heading}[/]  {usage}\n")
    if common:
        console.print(f"Settings of several {heading}:")
        _show_settings(console, common)
        console.print()
    width = max(len(entry["name"]) for entry in entries)
    for entry in entries:
        defaults = dict(entry["settings"])
        if "models" in entry:
            defaults["model"] = " | ".join(entry["models"])
        _show_entry(console, entry, width)
        texts = {key: f"{key}={default}" for key, default in defaults.items()}
        texts |= {key: key for key in entry["required"]}
        _show_settings(console, {texts[key]: entry["meanings"][key] for key in texts if key not in common})
        shared = "  ".join(f"{key}={value}" for key, value in defaults.items() if key in common)
        console.print(f"  {shared}\n" if shared else "")


def _show_entry(console: Terminal, entry: dict[str, Any], width: int) -> None:
    """Print an entry's name and summary; of a task also the metric, of a plugin its package."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=width)
    summary = entry["summary"]
    if "metric" in entry:
        better = "higher" if entry["higher_is_better"] else "lower"
        summary += f"; {entry['metric']}, {better} is better"
    if entry.get("package"):
        summary += f"; from {entry['package']}"
    line.add_row(f"[bold]{entry['name']}[/]", escape(summary))
    console.print(line)


def _show_settings(console: Terminal, meanings: dict[str, str]) -> None:
    """Print settings with their meanings."""
    if not meanings:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for setting, meaning in meanings.items():
        table.add_row(f"  {setting}", f"[dim]{escape(meaning)}[/]")
    console.print(table)
