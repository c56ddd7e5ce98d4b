"""Progress: what a person sees while a run goes on, when it is interrupted, and the tables at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from torch import Tensor

from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.core.units import size
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker
from offbeat.experiments.report.aggregate import Group, Statistic, changed
from offbeat.experiments.summary import Summary

REFRESH_S = 0.25
MOST_SHOWN = 8  # workers, one by one


@contextmanager
def report_interrupt(console: Terminal, *files: Path) -> Iterator[None]:
    """A run that keeps these files. Whoever interrupts it is told what has been saved by then."""
    before = {file: _written_at(file) for file in files}
    try:
        yield
    except KeyboardInterrupt:
        saved = [str(file) for file in files if _written_at(file) not in (None, before[file])]
        known = f"what was known by then is in {' and '.join(saved)}" if saved else "nothing was known yet"
        console.say(f"interrupted: {known}", style="yellow")
        raise


def _written_at(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


class Display(Callback):
    """One line that moves in a terminal; in a file or a pipe, a plain line now and then."""

    def __init__(
        self, latest: Callable[[], list[WorkerTotals]], notes: Sequence[str] = (), label: str | None = None
    ) -> None:
        self._latest = latest
        self._notes = notes
        self._label = label  # instead of the strategy's name
        self._console = Terminal()
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[status]}", table_column=Column(ratio=1, no_wrap=True)),
            expand=True,
            console=self._console,
            transient=True,
            auto_refresh=False,
        )
        self._shown_at = 0.0
        self._value = ""

    def started(self, job: Job, total_steps: int) -> None:
        self._job = job
        self._total_steps = total_steps
        for note in self._notes:
            self._console.warn(note)
        self._name = self._label or job.strategy.name
        self._bar = self._progress.add_task(escape(self._name), total=total_steps, status="")
        if self._console.is_terminal:
            self._progress.start()
        if self._label:  # one of many, most of them short
            self._shown_at = time.monotonic()

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = time.monotonic()
        if now - self._shown_at < (REFRESH_S if self._console.is_terminal else 2.0):
            return
        self._shown_at = now
        status = self._status(step, loss, worker)
        if self._console.is_terminal:
            self._progress.update(self._bar, completed=step, status=status, refresh=True)
        else:
            total = self._progress.tasks[0].total
            self._console.say(f"{self._name} step {step}/{total:.0f} {status}")

    def evaluated(self, history: list[Evaluation], entries: list[WorkerTotals]) -> None:
        known = {self._job.task.metric: history[-1].value, **history[-1].also}
        self._value = "".join(f"{name} {value:.4f} " for name, value in known.items())

    def closed(self) -> None:
        if self._console.is_terminal:  # elsewhere it never started, and would leave an empty line
            self._progress.stop()

    def _status(self, step: int, loss: Tensor, worker: Worker) -> str:
        entries = self._latest()
        speed = sum(e.samples for e in entries) / max(worker.seconds, 1e-9)
        now = f"loss {loss.item():.4f} {self._value}{speed:,.0f} samples/s"
        return f"{now} {plan(entries)}{shares(entries)}"


def plan(entries: list[WorkerTotals]) -> str:
    """The local steps that each worker is to do until its next exchange, where somebody plans them."""
    steps = [e.planned_steps for e in entries]
    if not any(steps):
        return ""
    few = len(steps) <= MOST_SHOWN
    return f"plan {' '.join(map(str, steps)) if few else f'{min(steps)} to {max(steps)}'} "


def shares(entries: list[WorkerTotals]) -> str:
    """How the workers spend their time, what they sent, and who is slowest."""
    if not entries:
        return ""
    total = max(sum(e.compute_s + e.wait_s for e in entries), 1e-9)
    parts = {
        "compute": sum(e.compute_s for e in entries),
        "communicate": sum(e.communicate_s for e in entries),
        "wait": sum(e.wait_s for e in entries),
    }
    text = " ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())
    slowest = max(entries, key=lambda e: e.compute_s / max(e.steps, 1))
    return f"{size(sum(e.bytes_sent for e in entries))} sent {text} slowest: rank {slowest.rank}"


def result_table(summaries: list[Summary]) -> Table:
    """One row a run: how long, how good, how much was sent, how much of the time was waiting."""
    metric = summaries[0]["metric"] if summaries else "value"
    target = summaries[0]["target"] if summaries else None
    table = Table("strategy", "settings", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    reached = "to target" if target is None else f"to {target:g}"
    for column in ("seconds", reached, metric, "bytes", "synced", "waiting"):
        table.add_column(column, justify="right", no_wrap=True)
    for s in summaries:
        total = sum(w["compute_s"] + w["wait_s"] for w in s["per_worker"])
        waiting = sum(w["wait_s"] for w in s["per_worker"]) / total if total else 0.0
        seconds = s["seconds_to_target"]
        table.add_row(
            f"[bold]{s['strategy']}[/]",
            escape(" ".join(changed(s["strategy"], s["settings"])) or "defaults"),
            f"{s['seconds']:.1f}",
            "–" if target is None else "never" if seconds is None else f"{seconds:.1f}",
            "–" if s["value"] is None else f"{s['value']:.4f}",
            size(s["bytes_sent"]),
            f"{s['sync_steps']}/{s['steps']}",
            f"{waiting:.0%}",
        )
    return table


def comparison_table(groups: list[Group]) -> Table:
    """One row a strategy: means over the seeds, and how far the runs spread around them."""
    first = groups[0].runs[0]
    target = first["target"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    longest = max(len(word) for group in groups for word in (*group.label.split(), *group.changed()))
    table.add_column("strategy", min_width=max(9, min(longest, 20)), overflow="fold")
    to = () if target is None else (f"s to {target:g}", f"bytes to {target:g}")
    for column in ("seconds", *to, first["metric"], "bytes", "synced", "waiting"):
        table.add_column(column, justify="right", no_wrap=column not in to)
    for group in groups:
        runs = len(group.runs)
        more = [f"\n{escape(text)}" for text in group.changed() if text not in group.told]
        table.add_row(
            "".join([f"[bold]{escape(group.label)}[/]", *more]),
            shown(group.figure("seconds"), "{:.3g}".format),
            *([] if target is None else _race(group, runs)),
            shown(group.figure("value"), "{:.4f}".format),
            shown(group.figure("bytes_sent"), size),
            shown(group.synced, "{:.0%}".format),
            shown(group.waiting, "{:.0%}".format),
        )
    return table


def _race(group: Group, runs: int) -> list[str]:
    seconds, nbytes = group.figure("seconds_to_target"), group.figure("bytes_to_target")
    return [to_target(seconds, runs, "{:.3g}".format), to_target(nbytes, runs, size)]


def shown(figure: Statistic, written: Callable[[float], str]) -> str:
    """12.3 and beneath ± 0.4, or the number alone if there was one run."""
    if figure.mean is None:
        return "–"
    return written(figure.mean) + (f"\n± {written(figure.spread)}" if figure.spread is not None else "")


def to_target(figure: Statistic, runs: int, written: Callable[[float], str]) -> str:
    """What it took to reach the target: never, or the mean over the runs that did."""
    if not figure.runs:
        return "never"
    return shown(figure, written) + (f"\n{figure.runs} of {runs} runs" if figure.runs < runs else "")


def worker_table(summary: Summary) -> Table:
    """One row a rank: where its time went."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    planned = any(w["planned_steps"] for w in summary["per_worker"])
    for column in ("rank", "steps", "computing s", "communicating s", "waiting s", "bytes sent"):
        table.add_column(column, justify="right")
    if planned:
        table.add_column("planned steps", justify="right")
    for w in summary["per_worker"]:
        table.add_row(
            str(w["rank"]),
            str(w["steps"]),
            f"{w['compute_s']:.2f}",
            f"{w['communicate_s']:.2f}",
            f"{w['wait_s']:.2f}",
            size(w["bytes_sent"]),
            *([str(w["planned_steps"])] if planned else []),
        )
    return table
