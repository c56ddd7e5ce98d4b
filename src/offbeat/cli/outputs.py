"""The outputs of a running job besides its summary: progress, a log, TensorBoard, a dashboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from offbeat.cli import options
from offbeat.cli.progress import Display
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.errors import SettingError
from offbeat.experiments.callbacks.dashboard import Dashboard
from offbeat.experiments.callbacks.jsonl import JsonLines
from offbeat.experiments.callbacks.tensorboard import TensorBoard
from offbeat.experiments.loop import Callback


@dataclass(frozen=True, kw_only=True)
class LiveOutputs:
    """Options for what a run shows and writes while it trains."""

    log: options.LogFile = None
    tensorboard: options.TensorBoardFolder = None
    dashboard: options.ShowDashboard = False
    dashboard_port: options.DashboardPort = 0

    def check(self, force: bool) -> None:
        """Raise an error if an output cannot be written or would overwrite a file, before training starts."""
        if self.log is not None:
            options.check_new_file(self.log, force, "--log")
        if self.tensorboard is not None:
            if find_spec("tensorboard") is None:
                raise SettingError(
                    "--tensorboard needs the package tensorboard: pip install 'offbeat[tensorboard]'"
                )
            if self.tensorboard.exists() and not self.tensorboard.is_dir():
                raise SettingError(f"--tensorboard {self.tensorboard} is a file: give a folder")


@dataclass(frozen=True)
class RunCallbacks:
    """A factory of the callbacks of worker 0, pickled and sent to the process that trains worker 0."""

    live: LiveOutputs = LiveOutputs()
    notes: tuple[str, ...] = ()

    def __call__(
        self, latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
    ) -> list[Callback]:
        callbacks: list[Callback] = [Display(latest, self.notes)]
        live = self.live
        if live.log is not None:
            callbacks.append(JsonLines(live.log))
        if live.tensorboard is not None:
            callbacks.append(TensorBoard(live.tensorboard))
        if live.dashboard:
            with options.naming("--dashboard-port"):
                callbacks.append(Dashboard(latest, hosts, live.dashboard_port, announce=_announce))
        return callbacks


def _announce(url: str) -> None:
    Terminal().say(f"dashboard: {url}")
