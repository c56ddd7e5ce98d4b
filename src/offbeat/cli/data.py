"""offbeat data: verify the data sets, and download missing ones."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from offbeat.cli import options
from offbeat.cli.terminal import Terminal
from offbeat.errors import DataError, SettingError

if TYPE_CHECKING:
    from offbeat.experiments.tasks.files.manifest import DatasetManifest, File


def data_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="Tasks. \\[default: all]", show_default=False),
    ] = None,
    data: options.DataFolder = None,
    fetch: Annotated[bool, typer.Option("--download", help="Fetch missing or damaged files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """List the data sets, verify their checksums, and fetch missing files.

    The exit code is 0 if all files are present and verified, otherwise 1.
    """
    from offbeat.core.settings import lookup
    from offbeat.experiments.tasks import TASKS
    from offbeat.experiments.tasks.files.locate import VARIABLE, data_folder

    kinds = {name: lookup("task", name, TASKS) for name in names} if names else TASKS.load()[0]
    folder = data_folder(data)
    console = Terminal(stderr=as_json)
    if fetch:
        if folder is None:
            raise SettingError(f"say where to put the data: give --data DIR, or set {VARIABLE}=DIR")
        for name, kind in kinds.items():
            if kind.manifest is not None:
                _fetch(name, kind.manifest, folder, console)
    states = {}
    for name, kind in kinds.items():
        with console.status(f"verifying {name}"):
            states[name] = state_of(kind.manifest, folder)
    if as_json:
        typer.echo(json.dumps({name: state.to_json() for name, state in states.items()}, indent=1))
    else:
        _show(console, states, folder)
    if not all(state.good for state in states.values()):
        raise typer.Exit(1)


@dataclass(frozen=True)
class State:
    """The state of a data set: the paths of its files, and the problems found."""

    manifest: DatasetManifest | None  # None: the task needs no files
    paths: dict[str, Path]
    problems: dict[str, str]

    @property
    def good(self) -> bool:
        """True if every file is present and as published."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """Return the state for other programs."""
        if self.manifest is None:
            return {"good": True}
        return {
            "good": self.good,
            "folder": self.manifest.folder,
            "files": {name: str(self.paths[name]) for name in self.paths},
            "problems": self.problems,
            "addresses": self.manifest.addresses,
            "licence": self.manifest.licence,
        }


def state_of(manifest: DatasetManifest | None, folder: Path | None) -> State:
    """Verify the files of a data set."""
    from offbeat.experiments.tasks.files.download import problem
    from offbeat.experiments.tasks.files.locate import found

    if manifest is None:
        return State(None, {}, {})
    paths = found(manifest, folder) if folder is not None else {}

    def wrong(file: File) -> str | None:
        return problem(file, paths[file.name]) if file.name in paths else "missing"

    with ThreadPoolExecutor() as pool:  # decompression and checksums release the GIL
        findings = zip(manifest.names, pool.map(wrong, manifest.files), strict=True)
    return State(manifest, paths, {name: finding for name, finding in findings if finding is not None})


def _show(console: Terminal, states: dict[str, State], folder: Path | None) -> None:
    from offbeat.experiments.tasks.files.locate import VARIABLE

    table = Table("task", "data", "size", "licence", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, state in states.items():
        if state.manifest is None:
            table.add_row(f"[bold]{name}[/]", "[green]nothing is needed[/]")
            continue
        megabytes = f"{sum(file.nbytes for file in state.manifest.files) / 1e6:.1f} MB"
        table.add_row(f"[bold]{name}[/]", _describe(state), megabytes, state.manifest.licence)
    if folder is not None:
        console.say(f"data folder: {folder}")
    console.show(table)
    for name, state in states.items():
        if state.manifest is not None and not state.good:
            _show_problems(console, name, state, state.manifest, folder)
    if folder is None:
        console.tell(f"No data folder is set: give --data DIR, or set {VARIABLE}=DIR.")


def _describe(state: State) -> str:
    absent = sum(finding == "missing" for finding in state.problems.values())
    damaged = len(state.problems) - absent
    if state.good:
        return f"[green]verified[/] in {escape(next(iter(state.paths.values())).parent.name)}"
    parts = [f"{absent} missing"] * bool(absent) + [f"{damaged} not as published"] * bool(damaged)
    assert state.manifest is not None
    return f"[red]{', '.join(parts)}[/] of {len(state.manifest.files)} files"


def _show_problems(
    console: Terminal, name: str, state: State, manifest: DatasetManifest, folder: Path | None
) -> None:
    lines = [f"\n[bold]{name}[/]"]
    for file, finding in state.problems.items():
        lines.append(f"  {escape(file)}: missing" if finding == "missing" else f"  {escape(finding)}")
    lines.append(f"  {manifest.origin}")
    lines += [f"  {escape(address.format(name='FILE'))}" for address in manifest.addresses]
    target = "DIR" if folder is None else escape(str(folder))
    lines.append(f"  To fetch it:  offbeat data {name} --data {target} --download")
    lines.append(f"  Or put the files, as they are or compressed (.gz, .xz), into {target}/{manifest.folder}")
    for line in lines:
        console.print(line, soft_wrap=True)


def _fetch(name: str, manifest: DatasetManifest, folder: Path, console: Terminal) -> None:
    """Download one data set with a progress bar per file; report an error instead of raising it."""
    from offbeat.experiments.tasks.files.download import download

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console) as bars:
        shown = {}

        def progress(file: str, received: int, total: int) -> None:
            if file not in shown:
                shown[file] = bars.add_task(f"{name}: {file}", total=total or None)
            bars.update(shown[file], completed=received)

        try:
            fetched = download(manifest, folder, progress)
        except DataError as error:
            bars.print(f"[bold red]{name}:[/] {escape(str(error))}", soft_wrap=True)
            return
    for path in fetched:
        console.say(f"{name}: {path}")
