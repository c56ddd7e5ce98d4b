"""Links: real connections on loopback, between threads where that will do."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct

import pytest
import torch
import torch.distributed as dist

from offbeat.worlds.processes.server import connection as links
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.discovery import register, resolve
from offbeat.worlds.processes.server.wire import HEADER, NOW, MessageType, encode_header
from tests.support.beside import beside
from tests.support.connections import close, connection_pair
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

SIOCOUTQNSD = 0x894B  # Linux's request for the bytes of a socket that have not been sent


def test_headers_and_tensors_of_any_kind_come_through() -> None:
    server, worker = connection_pair()
    sent = [torch.randn(7), torch.randn(3).bfloat16(), torch.tensor([], dtype=torch.float64)]
    sent += [torch.arange(5, dtype=torch.float64), torch.tensor([0.1], dtype=torch.half)]
    worker.send(encode_header(MessageType.PUSH, 12, NOW), *sent)
    head, came = torch.zeros(HEADER, dtype=torch.int64), [torch.zeros_like(tensor) for tensor in sent]
    server.receive(head, *came)
    assert head.tolist() == [MessageType.PUSH, 12, NOW, 0, 0]
    assert all(map(torch.equal, sent, came))
    close(server, worker)


def test_what_is_larger_than_any_buffer_comes_through_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PIECE_BYTES", 1 << 20)
    server, worker = connection_pair()
    sent = [torch.randn(2_600_000), torch.randn(33, dtype=torch.float64), torch.zeros(0), torch.randn(16)]
    sending = beside(worker.send, *sent)
    came = [torch.zeros_like(tensor) for tensor in sent]
    pieces = [piece.nbytes for piece in server.receive_pieces(*came)]
    sending.result(HANG_S)
    assert pieces == [1 << 20] * 9 + [10_400_000 - 9 * (1 << 20), 33 * 8, 64]
    assert all(map(torch.equal, sent, came))
    close(server, worker)


def test_a_flush_waits_until_nearly_all_has_left() -> None:
    """The other end reads only when all lies in this end's buffer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        near.connect(listener.getsockname())
        worker, server = Connection(near, HANG_S), Connection(listener.accept()[0], HANG_S)

    def unsent() -> int:
        (count,) = struct.unpack("i", fcntl.ioctl(near.fileno(), SIOCOUTQNSD, bytes(4)))
        return int(count)

    sent, came = torch.randn(50_000), torch.zeros(50_000)
    worker.send(sent)
    assert unsent() > links.UNSENT_BYTES
    reading = beside(server.receive, came)
    worker.flush()
    assert unsent() <= links.UNSENT_BYTES
    reading.result(HANG_S)
    assert torch.equal(sent, came)
    close(server, worker)


def test_a_closed_end_is_noticed_also_in_mid_tensor() -> None:
    for said in (torch.zeros(0), torch.ones(3)):
        server, worker = connection_pair()
        worker.send(said)
        worker.close()
        with pytest.raises(ConnectionResetError, match="the other end is gone"):
            server.receive(torch.zeros(4))
        server.close()


def test_one_who_takes_too_long_is_not_waited_for() -> None:
    server, worker = connection_pair()
    server.limit(0.01)
    with pytest.raises(TimeoutError):
        server.receive(torch.zeros(1))
    close(server, worker)


def test_another_thread_can_end_it() -> None:
    server, worker = connection_pair()
    receiving = beside(server.receive, torch.zeros(1))
    server.end()
    with pytest.raises(ConnectionResetError):
        receiving.result(HANG_S)
    close(server, worker)


def _three() -> str:
    """Rank 0 has a link to each of the others; rank 1 kills itself; ranks 0 and 2 go on, and make another."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    one = torch.ones(1)
    if rank:
        address = _address(store)
        link = Connection(socket.create_connection(address), HANG_S)
        link.send(torch.tensor([rank]))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["noticed"])
        link.send(one)
        again = Connection(socket.create_connection(address), HANG_S)
        again.send(one)
        close(link, again)
        return "well"
    listener, _ = register(store, b"secret", 0, "127.0.0.1", 9)
    with listener:
        of, came = {}, torch.zeros(1, dtype=torch.int64)
        for _ in range(2):
            link = Connection(listener.accept()[0], HANG_S)
            link.receive(came)
            of[came.item()] = link
        with pytest.raises(ConnectionResetError):
            of[1].receive(torch.zeros(1))
        store.set("noticed", "")
        of[2].receive(one)
        again = Connection(listener.accept()[0], HANG_S)
        again.receive(one)
        close(*of.values(), again)
    return "well"


def _address(store: dist.Store) -> tuple[str, int]:
    store.wait(["address/0"])
    address = resolve(store, b"secret", 0, "127.0.0.1")
    assert address is not None
    return address.endpoint


def test_only_the_link_of_a_killed_worker_fails() -> None:
    crew = Crew(3)
    try:
        crew.start(_three)
        assert crew.outcomes([0, 2]) == [(True, "well")] * 2
    finally:
        crew.dismiss()
