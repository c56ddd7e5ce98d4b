"""The state of the dashboard: one page about a running job, served to this machine only.

Worker 0's process serves the page, with the totals that the other workers publish. The training thread
refreshes the state between two steps, twice per second; see http.py for the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.callbacks.events import EventList
from offbeat.experiments.callbacks.http import LOOPBACK, Broadcaster, serve
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.experiments.report.aggregate import changed

EVERY_S = 0.5
KEPT_MOMENTS = 240  # of the loss, the speed and the waiting; older ones are thinned out
KEPT_EVENTS = 50
SHOWN_WORKERS = 64
STRAGGLER_FACTOR = 1.25  # a straggler's steps take more than this many times the others' median
END_TIMEOUT_S = 1.0  # for the last event to be sent; then the process may end


class Dashboard(Callback):
    """A page about a running job; `announce` receives its address when the job starts."""

    def __init__(
        self,
        latest: Callable[[], list[WorkerTotals]],
        hosts: Callable[[], dict[int, str]],
        tcp_port: int = 0,
        clock: Callable[[], float] = time.monotonic,
        announce: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._latest = latest
        self._hosts = hosts
        self._clock = clock
        self._announce = announce
        self._refreshed_at = float("-inf")
        self._speeds: dict[int, Speed] = {}
        self._state: dict[str, Any] = {}
        self._moments: list[dict[str, Any]] = []
        self._waits_before: dict[int, tuple[float, float]] = {}
        self._events = EventList()
        self._broadcaster = Broadcaster()
        self._server = serve(self._broadcaster, tcp_port)
        self.url = f"http://{LOOPBACK[0]}:{self._server.server_address[1]}/"

    def started(self, job: Job, total_steps: int) -> None:
        self._state = {
            "task": f"{job.task.name} ({job.task.model})",
            "strategy": job.strategy.name,
            "settings": job.strategy.settings(),
            "changed": changed(job.strategy.name, job.strategy.settings()),
            "metric": job.task.metric,
            "target": job.target,
            "total_steps": total_steps,
            "step": 0,
            "history": [],
            "workers": [],
            "straggler": None,
            "moments": [],
            "events": [],
            "left_s": None,
        }
        self._events = EventList(total_steps)
        self._started_at = self._clock()
        self._broadcaster.publish(self._state)
        self._announce(self.url)

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = self._clock()
        if now - self._refreshed_at < EVERY_S:
            return
        self._refreshed_at = now
        totals = self._latest()
        self._add_moment(totals, step, loss.item(), worker.seconds)
        left_s = (now - self._started_at) / step * (self._state["total_steps"] - step) if step else None
        self._refresh(totals, step=step, loss=loss.item(), seconds=worker.seconds, left_s=left_s)

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        points = [{"step": p.step, "seconds": p.seconds, "loss": p.loss, "value": p.value} for p in history]
        last = history[-1]
        self._refresh(
            worker_totals, step=last.step, loss=last.loss, seconds=last.seconds, history=points[-200:]
        )

    def closed(self) -> None:
        self._broadcaster.end(END_TIMEOUT_S)
        self._server.shutdown()
        self._server.server_close()

    def _refresh(self, worker_totals: list[WorkerTotals], **known: Any) -> None:
        hosts = self._hosts()
        workers = [self._row(totals, hosts.get(totals.rank, "")) for totals in worker_totals]
        shown = sorted(workers, key=lambda w: -w["step_compute_s"])[:SHOWN_WORKERS]
        slowest = straggler(workers)
        self._events.update(worker_totals, slowest, known["seconds"])
        current = {
            "moments": self._moments,
            "events": [event._asdict() for event in self._events.told[-KEPT_EVENTS:]],
            "workers": sorted(shown, key=lambda w: w["rank"]),
            "left_out": len(workers) - len(shown),
            "straggler": slowest,
            "samples_per_s": sum(totals.samples for totals in worker_totals) / max(known["seconds"], 1e-9),
            "bytes_sent": sum(totals.bytes_sent for totals in worker_totals),
            "bytes_total": sum(totals.bytes_total for totals in worker_totals),
        }
        self._state = {**self._state, **known, **current}
        self._broadcaster.publish(self._state)

    def _add_moment(self, worker_totals: list[WorkerTotals], step: int, loss: float, seconds: float) -> None:
        """Keep the loss, and each worker's fraction of waiting since the moment before."""
        waits = {t.rank: (t.wait_s, t.seconds) for t in worker_totals[:SHOWN_WORKERS]}
        before = self._waits_before
        self._waits_before = waits
        fractions = {
            rank: (wait_s - before.get(rank, (0.0, 0.0))[0]) / passed_s
            for rank, (wait_s, total_s) in waits.items()
            if (passed_s := total_s - before.get(rank, (0.0, 0.0))[1]) > 0
        }
        self._moments.append({"step": step, "seconds": seconds, "loss": loss, "waiting": fractions})
        if len(self._moments) > KEPT_MOMENTS:
            self._moments = self._moments[:-2:2] + self._moments[-2:]

    def _row(self, totals: WorkerTotals, host: str) -> dict[str, Any]:
        """Return one worker's row of the page's table."""
        before = self._speeds.get(totals.rank, Speed(WorkerTotals(totals.rank)))
        speed = self._speeds[totals.rank] = before.updated(totals)
        return {
            "rank": totals.rank,
            "name": f"rank {totals.rank}" + (f" on {host}" if host else ""),
            "steps": totals.steps,
            "steps_per_s": speed.steps_per_s,
            "step_compute_s": speed.step_compute_s,
            "waiting": totals.wait_s / totals.seconds if totals.seconds else 0.0,
            "staleness_mean": totals.staleness_mean,
            "staleness_max": totals.staleness_max,
            "bytes_sent": totals.bytes_sent,
            "sync_steps": totals.sync_steps,
            "local_steps": totals.local_steps,
        }


class Speed(NamedTuple):
    """A worker's recent speed."""

    since: WorkerTotals
    steps_per_s: float = 0.0
    step_compute_s: float = 0.0

    def updated(self, totals: WorkerTotals) -> Speed:
        """Return the speed since the last refresh; unchanged if the worker has published nothing new."""
        steps, seconds = totals.steps - self.since.steps, totals.seconds - self.since.seconds
        if steps <= 0 or seconds <= 0:
            return self
        return Speed(totals, steps / seconds, (totals.compute_s - self.since.compute_s) / steps)


def straggler(workers: list[dict[str, Any]]) -> str | None:
    """Return the name of the worker whose steps take longest, if it stands out; otherwise None."""
    if len(workers) < 2:
        return None
    *others, slowest = sorted(workers, key=lambda w: float(w["step_compute_s"]))
    usual = median(w["step_compute_s"] for w in others)
    return slowest["name"] if usual > 0 and slowest["step_compute_s"] > STRAGGLER_FACTOR * usual else None
