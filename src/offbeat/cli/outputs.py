"""Live: what a run tells while it goes on, beside the line of progress: a log, TensorBoard, a dashboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from offbeat.cli import options
from offbeat.core.ledger import WorkerTotals
from offbeat.errors import SettingError
from offbeat.experiments.callbacks.dashboard import Dashboard
from offbeat.experiments.callbacks.jsonl import JsonLines
from offbeat.experiments.callbacks.tensorboard import TensorBoard
from offbeat.experiments.loop import Callback


@dataclass(frozen=True, kw_only=True)
class LiveOutputs:
    log: Path | None = None
    tensorboard: Path | None = None
    dashboard: bool = False
    port: int = 0

    def check(self, force: bool) -> None:
        """Refuse what could not be written or shown, or would be lost, before anything starts."""
        options.check_file(self.log)
        if self.log is not None and self.log.exists() and not force:
            raise SettingError(f"{self.log} exists: choose another --log, or give --force")
        if self.tensorboard is not None:
            if find_spec("tensorboard") is None:
                raise SettingError(
                    "--tensorboard needs the package tensorboard: pip install 'offbeat[tensorboard]'"
                )
            if self.tensorboard.exists() and not self.tensorboard.is_dir():
                raise SettingError(f"--tensorboard {self.tensorboard} is a file: give a folder")

    def watchers(
        self, latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
    ) -> list[Callback]:
        """For the process of worker 0, which knows of the others what they have posted."""
        wanted: list[Callback] = []
        if self.log is not None:
            wanted.append(JsonLines(self.log))
        if self.tensorboard is not None:
            wanted.append(TensorBoard(self.tensorboard))
        if self.dashboard:
            wanted.append(Dashboard(latest, hosts, self.port))
        return wanted


NOTHING = LiveOutputs()
