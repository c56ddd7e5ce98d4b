"""Runs in virtual time: a job on a described cluster, with its summary and timeline."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import torch

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.experiments import trace
from offbeat.experiments.callbacks.recorder import Recorder
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, CallbackFactory
from offbeat.experiments.summary import Summary
from offbeat.experiments.tasks import Data
from offbeat.worlds.virtual.cluster import load_cluster
from offbeat.worlds.virtual.session import simulate


def simulate_here(
    job: Job,
    cluster: str,
    data: Data,
    out: Path,
    make_callbacks: CallbackFactory,
    device: torch.device | str = "cpu",
    trace_file: Path | None = None,
) -> Summary:
    """Simulate a job on a preset or cluster file, and return the summary that was written to `out`."""
    ledgers: list[Ledger] = []
    callbacks: list[Callback] = []

    def prepare(of_workers: list[Ledger]) -> list[Callback]:
        ledgers.extend(of_workers)
        for ledger in ledgers[: None if trace_file else trace.EXCERPT_WORKERS]:
            ledger.spans = [] if trace_file else deque(maxlen=trace.EXCERPT_SPANS)

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        callbacks.extend([Recorder(job, "virtual", out, latest, cluster=cluster), *make_callbacks(latest)])
        return callbacks

    simulate(job, load_cluster(cluster), data, prepare, device)
    timeline = [list(ledger.spans or ()) for ledger in ledgers]
    if trace_file is not None:
        trace.write(trace_file, timeline)
    for callback in callbacks:
        callback.ended(timeline)
    summary: Summary = json.loads((out / "summary.json").read_text())
    return summary
