"""Strangers: who reaches the store and the ports, but does not know the token, can neither read nor push."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import OffbeatError
from offbeat.worlds.processes.server import discovery, newcomers
from offbeat.worlds.processes.server.auth import TOKEN, prove
from offbeat.worlds.processes.server.channel import ClientIdentity, Request, ShardChannel
from offbeat.worlds.processes.server.connection import Connection, PlainStream
from offbeat.worlds.processes.server.discovery import resolve
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.tls import Certificate, TlsStream
from offbeat.worlds.processes.server.wire import HEADER, NEW, MessageType, encode_header
from tests.support.beside import beside, lightly, post
from tests.support.counting import Counting, count_on, counting_optimizer
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.relay import Relay, Wiretap
from tests.support.served import Serve
from tests.support.served import serve as serve
from tests.support.waiting import until

pytestmark = pytest.mark.processes

SECRET = b"secret"
SIZES = [("float32", 4)]


@pytest.fixture
def shard(tmp_path: Path) -> ShardServer:
    return ShardServer(post(tmp_path, SIZES), dist.HashStore(), SECRET)


@contextmanager
def admitting(shard: ShardServer) -> Iterator[tuple[str, int]]:
    """One connection to the shard, at this address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = beside(lambda: shard.admit(listener.accept()[0]))
        yield listener.getsockname()
        served.result(HANG_S)


def push_rubbish(to_shard: Connection) -> None:
    to_shard.send(encode_header(MessageType.JOIN, 0, NEW))
    answer = torch.zeros(HEADER, dtype=torch.int64)
    to_shard.receive(answer)
    to_shard.send(encode_header(MessageType.LOAD), torch.full((4,), 666.0))
    to_shard.receive(answer)


def with_tls(shard: ShardServer) -> Any:
    """The shard speaks TLS, as where other hosts reach it; return another one's certificate."""
    shard.certificate = Certificate()
    return Certificate()


# --- the store


def _attach_twice() -> list[bytes]:
    """Train with a server beside the workers, twice; return the tokens."""
    tokens = []
    for insecure in (False, True):
        model = Counting(dist.get_world_size())
        optimizer = counting_optimizer(model)
        with offbeat.attach(model, optimizer, offbeat.ASP(), timeout_s=HANG_S, insecure=insecure) as sync:
            count_on(model, optimizer)
            identity = sync.port.client.transport.channels[0]._identity  # type: ignore[union-attr]
            assert identity.insecure is insecure
            tokens.append(identity.token)
    return tokens


def test_the_store_of_the_launcher_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    crew = Crew(2)
    try:
        first, second = crew.run(lightly, _attach_twice)
        values = [crew._store.get(key) for key in crew._store.list_keys() if "barrier" not in key]
    finally:
        crew.dismiss()
    assert first == second and first[0] != first[1], "all ranks have the same token, of this run only"
    assert len(values) > 10
    assert not [value for value in values for token in first if token in value]


def test_a_worker_is_not_led_to_another_address(shard: ShardServer) -> None:
    ran = beside(shard.run)
    identity = ClientIdentity(shard.store, "127.0.0.1", 0, SECRET, HANG_S)
    honest = ShardChannel(identity, 0, "shard 0")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.0)
        shard.store.set("address/0", f" {stranger.getsockname()[1]}")
        with pytest.raises(OffbeatError, match="'address/0' in the store is not signed with this token"):
            ShardChannel(ClientIdentity(shard.store, "127.0.0.1", 1, SECRET, 0.1), 0, "shard 0")
        with pytest.raises(BlockingIOError):
            stranger.accept()
    honest.leave()
    ran.result(HANG_S)


def test_a_server_is_reached_at_its_address_only(serve: Serve, tmp_path: Path) -> None:
    served = serve("--workers", "1", "--listen", "127.0.0.1:0", "--snapshots", str(tmp_path))
    tcp_port = int(served.address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", tcp_port), HANG_S).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", tcp_port), HANG_S)


# --- the connection


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_relay_is_refused(shard: ShardServer, encrypted: bool) -> None:
    certificate = with_tls(shard) if encrypted else None
    with admitting(shard) as address:
        relay = Relay(address, push_rubbish, certificate)
        worker = Connection(socket.create_connection(relay.address), HANG_S)
        if encrypted:
            worker.encrypt()
        assert not prove(worker, SECRET), "the worker learns it"
        assert relay.done.result(HANG_S) == "refused"
        worker.close()
    assert not shard.attendance.joined and not shard.has_weights, "the shard heard nothing of the relay's"


def test_what_travels_between_hosts_cannot_be_read(shard: ShardServer) -> None:
    """Encrypted bytes may be forwarded: that is what a network does."""
    weights = torch.tensor([1.5, 2.5, 3.5, 4.5])
    with_tls(shard)
    with admitting(shard) as address:
        tap = Wiretap(address)
        worker = Connection(socket.create_connection(tap.address), HANG_S)
        worker.encrypt()
        assert prove(worker, SECRET)
        answer = torch.zeros(HEADER, dtype=torch.int64)
        worker.send(encode_header(MessageType.JOIN, 0, NEW))
        worker.receive(answer)
        worker.send(encode_header(MessageType.LOAD), weights)
        worker.receive(answer)
        worker.send(encode_header(MessageType.LEAVE))
    worker.close()
    assert torch.equal(shard.server.weights[0], weights)
    assert len(tap.heard) > 500
    assert weights.numpy().tobytes() not in tap.heard


@contextmanager
def running(shard: ShardServer) -> Iterator[tuple[str, int]]:
    """Run a shard at this address; a worker joins and leaves at the end."""
    ran = beside(shard.run)
    until(lambda: shard.store.check(["address/0"]))
    address = resolve(shard.store, SECRET, 0, "127.0.0.1")
    assert address is not None
    yield address.endpoint
    channel = ShardChannel(ClientIdentity(shard.store, "127.0.0.1", 0, SECRET, HANG_S), 0, "shard 0")
    assert list(shard.sessions) == [0]
    channel.leave()
    ran.result(HANG_S)


def test_strangers_use_up_neither_threads_nor_files(
    shard: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomers, "MOST", 2)
    monkeypatch.setattr(newcomers, "JOIN_TIMEOUT_S", HANG_S)
    with running(shard) as address:
        mute = []
        for _ in range(3):
            mute.append(socket.create_connection(address, HANG_S))
            assert len(mute[-1].recv(64)) == 32, "it is asked for a proof"
        assert mute[0].recv(64) == b"", "no more than two at once: the oldest has to go"
        assert len(shard.newcomers) == 2
    # A worker has joined beside them.
    for each in mute:
        each.close()


def test_a_stranger_who_speaks_slowly_is_ended(shard: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of each byte is never reached: here there is none."""
    with running(shard) as address, monkeypatch.context() as patch:
        patch.setattr(Connection, "limit", lambda connection, patience_s: None)
        patch.setattr(newcomers, "JOIN_TIMEOUT_S", 0.1)
        with socket.create_connection(address, HANG_S) as slow:
            while slow.recv(64):
                pass


# --- between hosts


@pytest.fixture
def among_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a network: loopback is taken for an interface that other hosts reach."""
    for version in (discovery.ipaddress.IPv4Address, discovery.ipaddress.IPv6Address):
        monkeypatch.setattr(version, "is_loopback", False)


def train(channel: ShardChannel) -> list[float]:
    """Load, push and pull; return the weights."""
    read = torch.zeros(4)
    for kind, number, payload, answer in (
        (MessageType.LOAD, 0, [torch.ones(4)], []),
        (MessageType.PUSH, 1, [torch.ones(4)], []),
        (MessageType.PULL, 1, [], [read]),
    ):
        head = torch.zeros(HEADER, dtype=torch.int64)
        request = Request([encode_header(kind, number), *payload], [head, *answer])
        assert channel.finish(channel.start(request), monotonic() + HANG_S) is None
    numbers: list[float] = read.tolist()
    return numbers


@pytest.mark.usefixtures("among_hosts")
@pytest.mark.parametrize("insecure", [False, True])
def test_a_shard_that_other_hosts_reach_speaks_tls_unless_told_not_to(tmp_path: Path, insecure: bool) -> None:
    config = replace(post(tmp_path, SIZES), insecure=insecure)
    shard = ShardServer(config, dist.HashStore(), SECRET)
    ran = beside(shard.run)
    identity = ClientIdentity(shard.store, "127.0.0.1", 0, SECRET, HANG_S)
    if insecure:
        with pytest.raises(
            OffbeatError, match=r"shard 0 does not encrypt its connections: .* OFFBEAT_INSECURE=1"
        ):
            ShardChannel(identity, 0, "shard 0")
    channel = ShardChannel(replace(identity, insecure=insecure), 0, "shard 0")
    assert channel._pipeline is not None
    stream = channel._pipeline._connection._stream
    assert isinstance(stream, PlainStream if insecure else TlsStream)
    assert train(channel) == [2.0] * 4
    stream._socket.shutdown(socket.SHUT_RDWR)  # as when the network fails
    head = torch.zeros(HEADER, dtype=torch.int64)
    again = Request([encode_header(MessageType.PULL, 1)], [head, torch.zeros(4)])
    assert channel.finish(channel.start(again), monotonic() + HANG_S) is None
    assert again.answer[1].tolist() == [2.0] * 4, "it reconnects, over TLS again"
    channel.leave()
    ran.result(HANG_S)
