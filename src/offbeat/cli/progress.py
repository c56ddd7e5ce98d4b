"""The progress of a run in the terminal, and the message after an interrupt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text
from torch import Tensor

from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.core.units import percent, size
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.worlds.virtual.cluster import load_cluster

REFRESH_S = 0.25
PLAIN_LINES_S = 2.0  # seconds between lines in a file or a pipe
BAR_COLUMNS = 53  # of a terminal, for the bar, the steps and the times
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
    described = load_cluster(cluster)
    of = "" if workers == described.size else "described as "
    return f"virtual: {workers} workers on {cluster}" + (
        f" ({of}{described.summary})" if described.summary else ""
    )


class Display(Callback):
    """A progress bar in a terminal; in a file or a pipe, a plain line every two seconds.

    The terminal shows the status below the bar, in as many lines as its width needs.
    """

    def __init__(
        self,
        latest: Callable[[], list[WorkerTotals]],
        notes: Sequence[str] = (),
        label: str | None = None,
        console: Terminal | None = None,
    ) -> None:
        self._latest = latest
        self._notes = notes
        self._label = label  # instead of the strategy's name
        self._console = Terminal() if console is None else console
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[time]}", table_column=Column(no_wrap=True)),
            console=self._console,
        )
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._began_at = time.monotonic()
        self._shown_at = 0.0
        self._first: tuple[int, float] | None = None
        self._values: list[str] = []
        self._told: dict[int, int] = {}  # by rank: the last of its events that was shown

    def started(self, job: Job, total_steps: int) -> None:
        self._job = job
        self._total_steps = total_steps
        for note in self._notes:
            self._console.warn(note)
        self._name = self._label or job.strategy.name
        # A name that leaves the bar and the times too little room has a line of its own.
        is_long = len(self._name) > self._console.width - BAR_COLUMNS
        self._head = [Text(self._name)] if is_long else []
        self._bar = self._progress.add_task("" if is_long else escape(self._name), total=total_steps, time="")
        if self._console.is_terminal:
            self._live.start()
        if self._label:  # one of many, mostly short runs: show no line at once
            self._shown_at = time.monotonic()

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = time.monotonic()
        if now - self._shown_at < (REFRESH_S if self._console.is_terminal else PLAIN_LINES_S):
            return
        self._shown_at = now
        totals = self._latest()
        self._tell_changes(totals)
        status = self._status(totals, loss, worker)
        if self._console.is_terminal:
            self._progress.update(self._bar, completed=step, time=self._times(step, now))
            shown = Group(*self._head, self._progress.get_renderable(), Text(status))
            self._live.update(shown, refresh=True)
        else:
            self._console.say(
                f"{self._name} step {step}/{self._total_steps}, {self._times(step, now)}, {status}"
            )

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self._tell_changes(worker_totals)
        metrics = {self._job.task.metric: history[-1].value, **history[-1].extra_metrics}
        self._values = [f"{name} {value:.4f}" for name, value in metrics.items()]

    def closed(self) -> None:
        if self._console.is_terminal:  # elsewhere the bar never started, and would leave an empty line
            self._live.stop()

    def _times(self, step: int, now: float) -> str:
        """Describe the time that has passed and the time that the remaining steps will take."""
        elapsed = f"{duration(now - self._began_at)} elapsed"
        if self._first is None:
            self._first = step, now  # the first step takes far longer than the others, so it does not count
        first_step, first_at = self._first
        if step == first_step:
            return elapsed
        left_s = (now - first_at) / (step - first_step) * (self._total_steps - step)
        return f"{elapsed}, {duration(left_s)} left"

    def _tell_changes(self, totals: list[WorkerTotals]) -> None:
        """Print each change of the strategy once, with its reason."""
        for worker in totals:
            told = self._told.get(worker.rank, 0)
            for number, _, kind, text in worker.events:
                if number > told and kind == "changed":
                    self._console.tell(f"{self._name}: {text}")
                self._told[worker.rank] = max(number, self._told.get(worker.rank, 0))

    def _status(self, totals: list[WorkerTotals], loss: Tensor, worker: Worker) -> str:
        """Describe the run in the order of what matters."""
        speed = sum(t.samples for t in totals) / max(worker.seconds, 1e-9)
        parts = [f"loss {loss.item():.4f}", *self._values, *_time_fractions(totals), *_planned_steps(totals)]
        return ", ".join(
            [*parts, f"{speed:,.0f} samples/s", f"{size(sum(t.bytes_total for t in totals))} sent"]
        )


def duration(seconds: float) -> str:
    """Write a time as people read it: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _planned_steps(totals: list[WorkerTotals]) -> list[str]:
    """Describe the local steps planned until each worker's next exchange, if the strategy plans them."""
    steps = [t.planned_steps for t in totals]
    if not any(steps):
        return []
    few = len(steps) <= MOST_SHOWN
    return [f"planned steps {' '.join(map(str, steps)) if few else f'{min(steps)} to {max(steps)}'}"]


def _time_fractions(totals: list[WorkerTotals]) -> list[str]:
    """Describe the fractions of the workers' time, and the slowest rank."""
    if not totals:
        return []
    total_s = max(sum(t.compute_s + t.wait_s for t in totals), 1e-9)
    waiting = sum(t.wait_s for t in totals) / total_s
    communicating = sum(t.communicate_s for t in totals) / total_s
    slowest = max(totals, key=lambda t: t.compute_s / max(t.steps, 1))
    return [
        f"waiting {percent(waiting)}",
        f"slowest: rank {slowest.rank}",
        f"communicating {percent(communicating)}",
    ]
