"""A connection that fails is undone, and the first error is the one to show."""

from __future__ import annotations

from typing import Any

from offbeat.worlds.processes.connection import disconnect


class _Port:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def abandon(self) -> None:
        self.calls.append("abandon")

    def close(self) -> None:
        self.calls.append("close")
        raise RuntimeError("connection reset by peer")


def test_closing_a_port_after_a_failure_shows_no_error_of_its_own() -> None:
    port: Any = _Port()
    disconnect(port)
    assert port.calls == ["abandon", "close"]
