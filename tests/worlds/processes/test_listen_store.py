"""Stores that Offbeat starts: open where they were told to be, and nowhere else."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.errors import LaunchError
from offbeat.worlds.processes.listen_store import is_loopback, listen_store
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


ELSEWHERE = ("127.0.0.1", "127.0.0.3")


def _alone_at_its_port(held: ExitStack) -> dist.TCPStore:
    """Return a store whose port is held by this test at other addresses, where nobody listens."""
    for _ in range(20):  # another process may happen to have the port there
        store, attempt = listen_store("127.0.0.2", 0), ExitStack()
        with suppress(OSError), attempt:
            for address in ELSEWHERE:
                attempt.enter_context(socket.socket()).bind((address, store.port))
            held.push(attempt.pop_all())
            return store
    raise AssertionError("the stores' ports are taken at other addresses, too: they listen everywhere")


def test_a_store_answers_at_its_address_and_at_no_other() -> None:
    with ExitStack() as held:
        store = _alone_at_its_port(held)
        other = dist.TCPStore("127.0.0.2", store.port, is_master=False, wait_for_workers=False)
        other.set("key", "value")
        assert store.get("key") == b"value"
        for address in ELSEWHERE:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, store.port), HANG_S).close()


def test_a_port_that_is_taken_is_named() -> None:
    store = listen_store("127.0.0.1", 0)
    with pytest.raises(LaunchError, match=f"cannot listen at 127.0.0.1:{store.port}: .*already in use"):
        listen_store("127.0.0.1", store.port)


def test_a_name_that_is_loopback_on_this_host_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where a host's own name means 127.0.1.1: other hosts would wait in vain."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        return look_up("127.0.1.1" if host == "node-0" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(
        LaunchError, match=r"on this host node-0 means 127\.0\.1\.1, which no other host can reach"
    ):
        listen_store("node-0", 0)


@pytest.mark.parametrize(
    ("loopback", "hosts"),
    [
        (True, ["127.0.0.1", "127.0.0.9", "::1", "localhost"]),
        (False, ["0.0.0.0", "10.0.0.1", "node-0", ""]),
    ],
)
def test_loopback_is_known_by_how_it_is_written(loopback: bool, hosts: list[str]) -> None:
    assert [is_loopback(host) for host in hosts] == [loopback] * 4
