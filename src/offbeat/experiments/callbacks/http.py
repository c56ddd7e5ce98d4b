"""The dashboard's HTTP server on the loopback interface, with server-sent events.

    GET /         the page
    GET /events   every new snapshot, and at the end an event `end`
    GET /state    the latest snapshot, for other programs

The training thread publishes snapshots; the server's threads send them, so a page that is slow, or closed,
never delays training. All server threads end with the process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from offbeat.errors import SettingError
from offbeat.experiments.report.page import asset, live_page
from offbeat.experiments.summary import json_safe

LOOPBACK = ("127.0.0.1", "localhost")


class Broadcaster:
    """The latest snapshot of a run, handed from the training thread to the threads of the HTTP server."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = "{}"
        self._version = 0
        self._followers = 0
        self.ended = False

    def publish(self, state: dict[str, Any]) -> None:
        """Replace the snapshot, and wake all followers."""
        with self._changed:
            self._snapshot = json.dumps(json_safe(state), allow_nan=False)
            self._version += 1
            self._changed.notify_all()

    def end(self, timeout_s: float) -> None:
        """End the run for all followers; wait at most `timeout_s` until they have sent the last event."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._followers, timeout_s)

    def latest(self) -> str:
        """Return the latest snapshot as JSON."""
        with self._changed:
            return self._snapshot

    def follow(self, send: Callable[[str, str], None]) -> None:
        """Send new snapshots until the run ends, then an event `end`; skip snapshots that are outdated."""
        seen = 0
        with self._changed:
            self._followers += 1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self.ended or self._version > seen)  # noqa: B023
                    fresh, seen = self._version > seen, self._version
                    snapshot, ended = self._snapshot, self.ended
                if fresh:
                    send("message", snapshot)
                if ended:
                    send("end", "{}")
                    return
        finally:
            with self._changed:
                self._followers -= 1
                self._changed.notify_all()


def serve(broadcaster: Broadcaster, tcp_port: int) -> ThreadingHTTPServer:
    """Start a server on the loopback interface, in daemon threads; TCP port 0: any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0]
            if name not in LOOPBACK:  # another site's name that resolves to this machine: refuse its pages
                self.send_error(403, "open this page at localhost or 127.0.0.1")
            elif self.path == "/":
                self._send("text/html; charset=utf-8", live_page())
            elif self.path == "/state":
                self._send("application/json", broadcaster.latest())
            elif self.path == "/favicon.svg":
                self._send("image/svg+xml", asset("favicon.svg"))
            elif self.path == "/events":
                self._send_head("text/event-stream")
                try:
                    broadcaster.follow(self._send_event)
                except OSError:  # the page was closed
                    return
            else:
                self.send_error(404)

        def _send_event(self, event: str, data: str) -> None:
            self.wfile.write(f"event: {event}\ndata: {data}\n\n".encode())
            self.wfile.flush()

        def _send(self, content_type: str, text: str) -> None:
            self._send_head(content_type)
            self.wfile.write(text.encode())

        def _send_head(self, content_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the terminal belongs to the run."""

    class DashboardServer(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    try:
        server = DashboardServer((LOOPBACK[0], tcp_port), Handler)
    except OSError as error:
        raise SettingError(f"{tcp_port} cannot be used as a port: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    return server
