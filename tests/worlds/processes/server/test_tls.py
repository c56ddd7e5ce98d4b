"""TLS: what is sent arrives, from two threads at once; what is no TLS, or an older one, is refused."""

from __future__ import annotations

import socket
import ssl
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from offbeat.errors import LaunchError
from offbeat.worlds.processes.server import tls
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.tls import Certificate
from tests.support.beside import beside
from tests.support.connections import close, connection_pair
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def encrypted_pair(certificate: Certificate | None = None) -> tuple[Connection, Connection]:
    """The server's and the worker's."""
    server, worker = connection_pair()
    shaken = beside(server.encrypt, certificate or Certificate())
    worker.encrypt()
    shaken.result(HANG_S)
    return server, worker


def test_both_ends_name_the_same_channel_and_no_other() -> None:
    certificate = Certificate()
    pairs = [encrypted_pair(certificate), encrypted_pair(certificate), encrypted_pair(), connection_pair()]
    channels = [
        (server.channel(server_side=True), worker.channel(server_side=False)) for server, worker in pairs
    ]
    assert all(ours == theirs for ours, theirs in channels)
    assert len({ours for ours, _ in channels}) == 3, "the first two are of one shard"
    for pair in pairs:
        close(*pair)


def test_two_threads_at_each_end_send_and_receive_at_once() -> None:
    """Lengths are random: records, pieces and calls begin and end anywhere."""
    random, generator = Random(0), torch.Generator().manual_seed(0)
    server, worker = encrypted_pair()
    for _ in range(30):
        numels = [random.choice([0, 1, 7, 4096, 16385, 100_000, 700_001]) for _ in range(3)]
        sent = [
            [torch.randint(256, (n,), generator=generator, dtype=torch.uint8) for n in numels]
            for _ in range(2)
        ]
        came = [[torch.zeros_like(tensor) for tensor in tensors] for tensors in sent]
        ends = (server, worker)
        working = [beside(end.send, *tensors) for end, tensors in zip(ends, sent, strict=True)]
        working += [beside(end.receive, *tensors) for end, tensors in zip(reversed(ends), came, strict=True)]
        for each in working:
            each.result(HANG_S)
        assert all(map(torch.equal, sent[0] + sent[1], came[0] + came[1]))
    close(server, worker)


class Guarded:
    """An object whose methods are called with the lock held only."""

    def __init__(self, guarded: Any, lock: Any) -> None:
        self._guarded, self._lock = guarded, lock
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            assert self._lock.locked(), f"{name} without the lock"
            self.calls += 1
            return getattr(self._guarded, name)(*args)

        return call


def test_openssl_is_used_with_the_lock_held_only() -> None:
    """Two threads in one connection would go well almost always."""
    server, worker = encrypted_pair()
    guards = []
    for end in (server, worker):
        stream: Any = end._stream
        for name in ("_tls", "_incoming", "_outgoing"):
            setattr(stream, name, Guarded(getattr(stream, name), stream._lock))
            guards.append(getattr(stream, name))
    for source, target in ((server, worker), (worker, server)):
        source.send(torch.ones(3))
        target.receive(torch.zeros(3))
    assert all(guard.calls for guard in guards)
    close(server, worker)


def test_a_closed_end_is_noticed_also_in_mid_tensor() -> None:
    for said in (torch.zeros(0), torch.ones(3)):
        server, worker = encrypted_pair()
        worker.send(said)
        worker.close()
        with pytest.raises(ConnectionResetError, match="the other end is gone"):
            server.receive(torch.zeros(4))
        server.close()


def test_one_who_takes_too_long_is_not_waited_for() -> None:
    server, worker = encrypted_pair()
    server.limit(0.01)
    with pytest.raises(TimeoutError):
        server.receive(torch.zeros(1))
    close(server, worker)
    server, worker = connection_pair()
    server.limit(0.01)
    with pytest.raises(TimeoutError):
        server.encrypt(Certificate())
    close(server, worker)


def test_another_thread_can_end_it() -> None:
    server, worker = encrypted_pair()
    receiving = beside(server.receive, torch.zeros(1))
    server.end()
    with pytest.raises(ConnectionResetError):
        receiving.result(HANG_S)
    close(server, worker)


def test_what_is_no_tls_is_refused_as_a_broken_connection() -> None:
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\x16\x03\x01\xff\xff" + bytes(300)):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stranger = socket.create_connection(listener.getsockname())
            server = Connection(listener.accept()[0], HANG_S)
        stranger.sendall(nonsense)
        stranger.shutdown(socket.SHUT_WR)
        with stranger, pytest.raises(OSError):
            server.encrypt(Certificate())


def test_a_changed_byte_is_noticed() -> None:
    server, worker = encrypted_pair()
    stream = worker._stream
    stream._tls.write(b"weights")  # type: ignore[union-attr]
    encrypted = bytearray(stream._outgoing.read())  # type: ignore[union-attr]
    encrypted[-1] ^= 1
    worker._socket.sendall(encrypted)
    with pytest.raises(ssl.SSLError):
        server.receive(torch.zeros(7, dtype=torch.uint8))
    close(server, worker)


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    monkeypatch.setattr(tls, "_worker_context", older)
    server, worker = connection_pair()
    refused = beside(server.encrypt, Certificate())
    with pytest.raises(ssl.SSLError):
        worker.encrypt()
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        refused.result(HANG_S)


def test_no_key_stays_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tls.tempfile, "tempdir", str(tmp_path))
    written: list[bytes] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: written.append(data) or write(path, data))
    Certificate()
    assert not list(tmp_path.iterdir())
    assert [data.startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----") for data in written] == [True]


def test_without_the_package_an_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(
        LaunchError, match="pip install cryptography, or leave encryption out by OFFBEAT_INSECURE=1"
    ):
        Certificate()
