"""A shard that is sent what is no message, and more connections than it can hold: honest workers go on."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.worlds.processes.server import newcomers
from offbeat.worlds.processes.server import shard as serving
from offbeat.worlds.processes.server.discovery import resolve
from offbeat.worlds.processes.server.wire import HEADER, NEW, NOW, MessageType
from tests.support import beside
from tests.support.conversations import conversation
from tests.support.limits import HANG_S
from tests.support.shards import Hand, of, served, shard_of, way_to
from tests.support.waiting import until

pytestmark = pytest.mark.processes

# --- what is not of the protocol

MALFORMED: dict[str, tuple[list[Any], str]] = {
    "an unknown kind": ([17, 0], "a header of kind 17"),
    "a kind of servers": ([MessageType.PULL_REPLY, 0], "a header of kind 7"),
    "a push without a clock": ([MessageType.PUSH, 0], "PUSH with the numbers 0, 0, 0"),
    "a negative clock": ([MessageType.PULL, -2], "PULL with the numbers -2, 0, 0"),
    "a negative time": ([MessageType.PUSH, 1, -1], "PUSH with the numbers 1, -1, 0"),
    "too large a number": ([MessageType.PULL, 1 << 60], "PULL with the numbers"),
    "more than belongs there": ([MessageType.PULL, 1, 0, 5], "PULL with the numbers 1, 0, 5"),
    "joining twice": ([MessageType.JOIN, 1, NEW], "JOIN after JOIN"),
    "bytes too many": ([MessageType.PULL, NOW, torch.zeros(HEADER, dtype=torch.int64)], "a header of kind 0"),
    "a push too far": ([MessageType.PUSH, 9, *of(1.0)], "push 9 before push 8"),
    "bad weights to start with": ([MessageType.LOAD, *of(float("inf"))], "weights that are not finite"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_ends_its_own_link_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    shard = shard_of(tmp_path, workers=2)
    good, bad = (Hand(shard, worker) for worker in (0, 1))
    good.ask(MessageType.LOAD, *of(0.0))
    assert served(shard, bad, 1)
    message, words = MALFORMED[what]
    bad.say(*message)
    assert bad.refused()
    assert f"refused worker 1: it sent {words}" in caplog.text
    assert served(shard, good, 1)
    assert sorted(shard.sessions) == [0] and shard.server.state.of == {0: 1}
    back = Hand(shard, 1, 1)
    assert served(shard, back, 2), "it may come back and do better"
    for hand in (good, back):
        hand.leave()


@pytest.mark.parametrize("kind", [MessageType.LOAD, MessageType.PUSH, MessageType.PULL, MessageType.LEAVE])
def test_joining_comes_first(tmp_path: Path, caplog: Any, kind: MessageType) -> None:
    shard = shard_of(tmp_path)
    hasty = Hand(shard, 0, clock=None)
    hasty.say(kind, *[1] * (kind in (MessageType.PUSH, MessageType.PULL)))
    assert hasty.refused()
    assert f"it sent {kind.name} before JOIN" in caplog.text
    assert not shard.attendance.joined and not shard.sessions


def test_one_who_does_not_speak_the_language_is_a_stranger(tmp_path: Path, caplog: Any) -> None:
    shard = shard_of(tmp_path)
    ran = beside.beside(shard.run)
    way = way_to(shard, 3)
    address = resolve(shard.store, b"secret", 0, "127.0.0.1")
    assert address is not None
    for nonsense in (b"GET / HTTP/1.1\r\n" + bytes(80), bytes(64), b"\xff" * 300):
        with socket.create_connection(address.endpoint, timeout=HANG_S) as foreign:
            foreign.sendall(nonsense)
            with suppress(ConnectionResetError):  # it hung up without reading all of it
                while foreign.recv(64):
                    pass
    until(lambda: caplog.text.count("refused a connection with another token") == 3)
    assert list(shard.sessions) == [3]
    way.leave()
    ran.result(HANG_S)


def test_a_siege_over_real_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some hundreds of malformed conversations, while a good worker is served."""
    shard = shard_of(tmp_path)
    good, random, refused = Hand(shard, 0), Random(3), 0
    good.ask(MessageType.LOAD, *of(0.0))
    while refused < 200:
        said, bad = conversation(random)
        besieger = Hand(shard, 1 + refused % 3, clock=None)
        rooms = iter(of(0.0))
        for part in said:
            with suppress(ConnectionError):  # it may have heard enough
                if isinstance(part, Tensor):
                    rooms = iter(of(0.0))
                    besieger.link.send(part)
                else:
                    besieger.link.send(next(rooms).fill_(part))
        if not bad:
            besieger.link.end()
        besieger.served.result(HANG_S)
        besieger.link.close()
        assert caplog.text.count("it sent") == bad
        caplog.clear()
        refused += bad
        if refused % 20 == 0:
            shard.load_weights(of(0.0))
            assert good.ask(MessageType.PUSH, 1, *of(0.5))[0] == [MessageType.PUSH_ACK, 1, 0, 0]
            assert all(map(torch.equal, good.ask(MessageType.PULL, NOW)[1], of(0.5)))
            assert list(shard.sessions) == [0]
    good.leave()


# --- more connections than a process may have open


def test_a_shard_that_cannot_accept_tries_again(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "BACKOFF_S", 0.001)
    shard, failures = shard_of(tmp_path), [0]

    class Exhausted:
        def accept(self) -> Any:
            failures[0] += 1
            raise OSError(24, "Too many open files")

    for _ in range(3):
        shard._accept(Exhausted())  # type: ignore[arg-type]
    assert failures == [3]
    assert caplog.text.count("cannot accept connections: [Errno 24] Too many open files") == 1
    ran = beside.beside(shard.run)
    way_to(shard, 0).leave()
    ran.result(HANG_S)
    assert caplog.text.count("accepts connections again") == 1


def test_few_connections_that_do_not_join_stay_open(tmp_path: Path) -> None:
    """And one that joins is served beside them."""
    shard = shard_of(tmp_path)
    ran = beside.beside(shard.run)
    address = until(lambda: resolve(shard.store, b"secret", 0, "127.0.0.1"))
    many = range(3 * newcomers.MOST)
    strangers = [socket.create_connection(address.endpoint, timeout=HANG_S) for _ in many]
    way = way_to(shard, 0)
    assert list(shard.sessions) == [0]
    for stranger in strangers[: 2 * newcomers.MOST]:
        with suppress(ConnectionResetError):
            while stranger.recv(64):
                pass  # until the shard ends it
    assert len(shard.newcomers) <= newcomers.MOST
    for stranger in strangers:
        stranger.close()
    way.leave()
    ran.result(HANG_S)


def test_one_who_sends_a_byte_now_and_then_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deadline for all that it takes to join, not for each byte."""
    shard = shard_of(tmp_path)
    ran = beside.beside(shard.run)
    way = way_to(shard, 0)
    monkeypatch.setattr(newcomers, "JOIN_TIMEOUT_S", 0.3)
    address = resolve(shard.store, b"secret", 0, "127.0.0.1")
    assert address is not None
    with socket.create_connection(address.endpoint, timeout=HANG_S) as slow:
        slow.settimeout(0.05)
        with pytest.raises(OSError, match=r"ended|reset|Broken pipe"):
            for _ in range(80):  # fewer bytes than it takes to authenticate
                slow.sendall(b"x")
                with suppress(TimeoutError):
                    while True:
                        if not slow.recv(64):
                            raise ConnectionError("ended")
    way.leave()
    ran.result(HANG_S)
