"""Dashboard: one page about a run that goes on, served to this machine alone, by server-sent events.

    GET /         the page
    GET /events   a snapshot twice a second, and at the end an event `end`
    GET /state    the latest snapshot, for other programs

Worker 0's process serves it. Of the others it knows what they post on the board. Only the thread that trains
looks there, between two steps; the threads that serve hand out what it found, so a page that is slow, or
closed, never touches training. All of them end with the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import WorkerTotals
from offbeat.errors import SettingError
from offbeat.experiments.loop import Callback, Evaluation, Job, Worker
from offbeat.experiments.report.aggregate import changed
from offbeat.experiments.report.page import asset, live_page
from offbeat.experiments.summary import json_safe

EVERY_S = 0.5
SHOWN_WORKERS = 64
STANDS_OUT = 1.25  # a straggler computes so many times longer than the others' median
GOODBYE_S = 1.0  # for the last event to leave; then the process may end
HERE = ("127.0.0.1", "localhost")


class Dashboard(Callback):
    def __init__(
        self,
        latest: Callable[[], list[WorkerTotals]],
        hosts: Callable[[], dict[int, str]],
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latest = latest
        self._hosts = hosts
        self._clock = clock
        self._looked_at = float("-inf")
        self._speeds: dict[int, Speed] = {}
        self._state: dict[str, Any] = {}
        self._channel = Broadcaster()
        self._server = serve(self._channel, port)
        self.url = f"http://{HERE[0]}:{self._server.server_address[1]}/"

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
        }
        self._channel.publish(self._state)
        Terminal().say(f"dashboard: {self.url}")

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        now = self._clock()
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        self._look(self._latest(), step=step, loss=loss.item(), seconds=worker.seconds)

    def evaluated(self, history: list[Evaluation], entries: list[WorkerTotals]) -> None:
        points = [{"step": p.step, "seconds": p.seconds, "loss": p.loss, "value": p.value} for p in history]
        last = history[-1]
        self._look(entries, step=last.step, loss=last.loss, seconds=last.seconds, history=points[-200:])

    def closed(self) -> None:
        self._channel.end(GOODBYE_S)
        self._server.shutdown()
        self._server.server_close()

    def _look(self, entries: list[WorkerTotals], **known: Any) -> None:
        hosts = self._hosts()
        workers = [self._row(entry, hosts.get(entry.rank, "")) for entry in entries]
        shown = sorted(workers, key=lambda w: -w["step_compute_s"])[:SHOWN_WORKERS]
        about = {
            "workers": sorted(shown, key=lambda w: w["rank"]),
            "left_out": len(workers) - len(shown),
            "straggler": straggler(workers),
            "bytes_sent": sum(entry.bytes_sent for entry in entries),
        }
        self._state = {**self._state, **known, **about}
        self._channel.publish(self._state)

    def _row(self, entry: WorkerTotals, host: str) -> dict[str, Any]:
        """A worker in numbers."""
        speed = self._speeds[entry.rank] = self._speeds.get(entry.rank, Speed(WorkerTotals(entry.rank))).at(
            entry
        )
        return {
            "rank": entry.rank,
            "name": f"rank {entry.rank}" + (f" on {host}" if host else ""),
            "steps": entry.steps,
            "steps_per_s": speed.steps_per_s,
            "step_compute_s": speed.step_compute_s,
            "waiting": entry.wait_s / entry.seconds if entry.seconds else 0.0,
            "staleness_mean": entry.staleness_mean,
            "staleness_max": entry.staleness_max,
            "bytes_sent": entry.bytes_sent,
            "sync_steps": entry.sync_steps,
            "local_steps": entry.local_steps,
        }


class Speed(NamedTuple):
    """How fast a worker was lately."""

    since: WorkerTotals
    steps_per_s: float = 0.0
    step_compute_s: float = 0.0

    def at(self, entry: WorkerTotals) -> Speed:
        """The speed since the last look; if it has posted nothing new, the same as before."""
        steps, seconds = entry.steps - self.since.steps, entry.seconds - self.since.seconds
        if steps <= 0 or seconds <= 0:
            return self
        return Speed(entry, steps / seconds, (entry.compute_s - self.since.compute_s) / steps)


def straggler(workers: list[dict[str, Any]]) -> str | None:
    """The name of the one whose steps take longest, if it stands out; otherwise None."""
    if len(workers) < 2:
        return None
    *others, slowest = sorted(workers, key=lambda w: float(w["step_compute_s"]))
    usual = median(w["step_compute_s"] for w in others)
    return slowest["name"] if usual > 0 and slowest["step_compute_s"] > STANDS_OUT * usual else None


class Broadcaster:
    """From the thread that trains to those that serve: the latest snapshot, and that there is a new one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = "{}"
        self._edition = 0
        self._readers = 0
        self.ended = False

    def publish(self, state: dict[str, Any]) -> None:
        with self._changed:
            self._snapshot = json.dumps(json_safe(state), allow_nan=False)
            self._edition += 1
            self._changed.notify_all()

    def end(self, patience_s: float) -> None:
        """Tell the readers, and wait a little until they have told theirs."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers, patience_s)

    def latest(self) -> str:
        with self._changed:
            return self._snapshot

    def follow(self, tell: Callable[[str, str], None]) -> None:
        """Tell every new snapshot (or the newest of several), then that it is over."""
        seen = 0
        with self._changed:
            self._readers += 1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self.ended or self._edition > seen)  # noqa: B023
                    fresh, seen = self._edition > seen, self._edition
                    snapshot, ended = self._snapshot, self.ended
                if fresh:
                    tell("message", snapshot)
                if ended:
                    tell("end", "{}")
                    return
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()


def serve(channel: Broadcaster, port: int) -> ThreadingHTTPServer:
    """A server on loopback, in threads that no process waits for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0]
            if name not in HERE:  # another site's name that points here: not for its pages
                self.send_error(403, "only by the name of this machine itself")
            elif self.path == "/":
                self._send("text/html; charset=utf-8", live_page())
            elif self.path == "/state":
                self._send("application/json", channel.latest())
            elif self.path == "/favicon.svg":
                self._send("image/svg+xml", asset("favicon.svg"))
            elif self.path == "/events":
                self._head("text/event-stream")
                try:
                    channel.follow(self._tell)
                except OSError:  # the page was closed
                    return
            else:
                self.send_error(404)

        def _tell(self, event: str, data: str) -> None:
            self.wfile.write(f"event: {event}\ndata: {data}\n\n".encode())
            self.wfile.flush()

        def _send(self, kind: str, text: str) -> None:
            self._head(kind)
            self.wfile.write(text.encode())

        def _head(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal is the run's."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    try:
        server = Server((HERE[0], port), Handler)
    except OSError as problem:
        raise SettingError(f"--dashboard-port {port} cannot be used: {problem.strerror}") from problem
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    return server
