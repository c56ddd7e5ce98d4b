"""The outputs of a running job besides its summary: progress, a log, TensorBoard, a dashboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.cli import options
from offbeat.cli.options import LiveOutputs
from offbeat.cli.progress import Display
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.callbacks.dashboard import Dashboard
from offbeat.experiments.callbacks.jsonl import JsonLines
from offbeat.experiments.callbacks.tensorboard import TensorBoard
from offbeat.experiments.loop import Callback


@dataclass(frozen=True)
class RunCallbacks:
    """A factory of the callbacks of worker 0, pickled and sent to the process that trains worker 0."""

    live: LiveOutputs = field(default_factory=LiveOutputs)
    notes: tuple[str, ...] = ()

    def __call__(
        self, latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
    ) -> list[Callback]:
        live = self.live
        callbacks: list[Callback] = [] if live.quiet else [Display(latest, self.notes)]
        if live.log is not None:
            callbacks.append(JsonLines(live.log))
        if live.tensorboard is not None:
            callbacks.append(TensorBoard(live.tensorboard))
        if live.dashboard or live.dashboard_port:
            with options.naming("--dashboard-port"):
                callbacks.append(Dashboard(latest, hosts, live.dashboard_port, announce=_announce))
        return callbacks


def _announce(url: str) -> None:
    Terminal().say(f"dashboard: {url}")
