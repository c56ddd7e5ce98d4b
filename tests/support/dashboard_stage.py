"""A dashboard whose clock and workers a test moves."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import torch

from offbeat import BSP
from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.callbacks.dashboard import Dashboard
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.quadratic import Quadratic
from tests.support.limits import HANG_S


class Stage:
    """A dashboard whose clock and workers a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.entries = [WorkerTotals(rank=rank) for rank in range(3)]
        self.looks = 0
        self.dashboard = Dashboard(self.latest, lambda: {0: "here", 1: "there"}, clock=lambda: self.now)
        self.dashboard.started(Job(task=Quadratic(), strategy=BSP(), workers=3, target=0.5), 100)

    def latest(self) -> list[WorkerTotals]:
        self.looks += 1
        return self.entries

    def go(self, step: int, *computes_s: float, seconds: float) -> None:
        """Worker 0 has done `step` steps; each worker has computed so long in all."""
        self.now = seconds
        self.entries = [
            WorkerTotals(
                rank=rank,
                steps=step,
                compute_s=c,
                wait_s=seconds - c,
                bytes_sent=10,
                bytes_server=5,
                sync_steps=1,
            )
            for rank, c in enumerate(computes_s)
        ]
        worker: Any = type("Seen", (), {"seconds": seconds})()
        self.dashboard.stepped(step, torch.tensor(0.25), worker)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("state"))
        return found

    def get(self, path: str, **headers: str) -> str:
        request = urllib.request.Request(self.dashboard.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return str(answer.read().decode())
