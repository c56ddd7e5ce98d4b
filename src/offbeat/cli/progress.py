"""The progress of a run in the terminal, and the message after an interrupt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from torch import Tensor

from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.core.units import size
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.worlds.virtual.cluster import load_cluster

REFRESH_S = 0.25
PLAIN_LINES_S = 2.0  # seconds between lines in a file or a pipe
MOST_SHOWN = 8  # workers that are listed individually


@contextmanager
def report_interrupt(console: Terminal, *files: Path) -> Iterator[None]:
    """Print, after an interrupt in this context, which of `files` have been written."""
    before = {file: _written_at(file) for file in files}
    try:
        yield
    except KeyboardInterrupt:
        saved = [str(file) for file in files if _written_at(file) not in (None, before[file])]
        results = f"results so far are in {' and '.join(saved)}" if saved else "there are no results yet"
        console.say(f"interrupted: {results}", style="yellow")
        raise


def _written_at(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def virtual_note(workers: int, cluster: str) -> str:
    """Describe the cluster of a run in virtual time."""
    return f"virtual: {workers} workers on {cluster} ({load_cluster(cluster).summary})"


class Display(Callback):
    """A progress bar in a terminal; in a file or a pipe, a plain line every two seconds."""

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
        if self._label:  # one of many, mostly short runs: show no line at once
            self._shown_at = time.monotonic()

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = time.monotonic()
        if now - self._shown_at < (REFRESH_S if self._console.is_terminal else PLAIN_LINES_S):
            return
        self._shown_at = now
        status = self._status(step, loss, worker)
        if self._console.is_terminal:
            self._progress.update(self._bar, completed=step, status=status, refresh=True)
        else:
            total = self._progress.tasks[0].total
            self._console.say(f"{self._name} step {step}/{total:.0f} {status}")

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        metrics = {self._job.task.metric: history[-1].value, **history[-1].extra_metrics}
        self._value = "".join(f"{name} {value:.4f} " for name, value in metrics.items())

    def closed(self) -> None:
        if self._console.is_terminal:  # elsewhere the bar never started, and would leave an empty line
            self._progress.stop()

    def _status(self, step: int, loss: Tensor, worker: Worker) -> str:
        totals = self._latest()
        speed = sum(t.samples for t in totals) / max(worker.seconds, 1e-9)
        now = f"loss {loss.item():.4f} {self._value}{speed:,.0f} samples/s"
        return f"{now} {_planned_steps(totals)}{_time_fractions(totals)}"


def _planned_steps(totals: list[WorkerTotals]) -> str:
    """Describe the local steps planned until each worker's next exchange, if the strategy plans them."""
    steps = [t.planned_steps for t in totals]
    if not any(steps):
        return ""
    few = len(steps) <= MOST_SHOWN
    return f"plan {' '.join(map(str, steps)) if few else f'{min(steps)} to {max(steps)}'} "


def _time_fractions(totals: list[WorkerTotals]) -> str:
    """Describe the bytes sent, the fractions of the workers' time, and the slowest rank."""
    if not totals:
        return ""
    total_s = max(sum(t.compute_s + t.wait_s for t in totals), 1e-9)
    parts = {
        "compute": sum(t.compute_s for t in totals),
        "communicate": sum(t.communicate_s for t in totals),
        "wait": sum(t.wait_s for t in totals),
    }
    text = " ".join(f"{name} {seconds / total_s:.0%}" for name, seconds in parts.items())
    slowest = max(totals, key=lambda t: t.compute_s / max(t.steps, 1))
    return f"{size(sum(t.bytes_sent for t in totals))} sent {text} slowest: rank {slowest.rank}"
