"""Links: real connections on loopback, between threads where that will do."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist

from offbeat.worlds.processes.server import connection as links
from offbeat.worlds.processes.server import discovery as addresses
from offbeat.worlds.processes.server.auth import challenge, prove
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.discovery import ADDRESS, register, resolve
from offbeat.worlds.processes.server.wire import HEADER, NOW, MessageType, encode_header
from tests.support.beside import beside
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def ends() -> tuple[Connection, Connection]:
    """The server's and the worker's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = socket.create_connection(listener.getsockname())
        return Connection(listener.accept()[0], HANG_S), Connection(worker, HANG_S)


def close(*both: Connection) -> None:
    for link in both:
        link.close()


def test_headers_and_tensors_of_any_kind_come_through() -> None:
    server, worker = ends()
    sent = [torch.randn(7), torch.randn(3).bfloat16(), torch.tensor([], dtype=torch.float64)]
    sent += [torch.arange(5, dtype=torch.float64), torch.tensor([0.1], dtype=torch.half)]
    worker.send(encode_header(MessageType.PUSH, 12, NOW), *sent)
    head, came = torch.zeros(HEADER, dtype=torch.int64), [torch.zeros_like(tensor) for tensor in sent]
    server.receive(head, *came)
    assert head.tolist() == [MessageType.PUSH, 12, NOW, 0]
    assert all(map(torch.equal, sent, came))
    close(server, worker)


def test_what_is_larger_than_any_buffer_comes_through_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PIECE_BYTES", 1 << 20)
    server, worker = ends()
    sent = [torch.randn(2_600_000), torch.randn(33, dtype=torch.float64), torch.zeros(0), torch.randn(16)]
    sending = beside(worker.send, *sent)
    came = [torch.zeros_like(tensor) for tensor in sent]
    pieces = [piece.nbytes for piece in server.receive_pieces(*came)]
    sending.result(HANG_S)
    assert pieces == [1 << 20] * 9 + [10_400_000 - 9 * (1 << 20), 33 * 8, 64]
    assert all(map(torch.equal, sent, came))
    close(server, worker)


@pytest.mark.parametrize(("token", "right"), [(b"secret", True), (b"guess", False), (b"", False)])
def test_only_who_knows_the_token_proves_it(token: bytes, right: bool) -> None:
    server, worker = ends()
    proved = beside(prove, worker, token)
    assert challenge(server, b"secret") is right
    assert proved.result(HANG_S) is right, "the worker learns it too"
    close(server, worker)


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    """Be it that it sends back what the worker itself has said."""
    server, worker = ends()
    proved = beside(prove, worker, b"secret")
    said = torch.zeros(64, dtype=torch.uint8)
    server.send(torch.zeros(32, dtype=torch.uint8))
    server.receive(said)
    server.send(said[32:])
    assert proved.result(HANG_S) is False
    close(server, worker)


def test_a_closed_end_is_noticed_also_in_mid_tensor() -> None:
    for said in (torch.zeros(0), torch.ones(3)):
        server, worker = ends()
        worker.send(said)
        worker.close()
        with pytest.raises(ConnectionResetError, match="the other end is gone"):
            server.receive(torch.zeros(4))
        server.close()


def test_one_who_takes_too_long_is_not_waited_for() -> None:
    server, worker = ends()
    server.limit(0.01)
    with pytest.raises(TimeoutError):
        server.receive(torch.zeros(1))
    close(server, worker)


def test_another_thread_can_end_it() -> None:
    server, worker = ends()
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
    with register(store, 0, "127.0.0.1", 9) as listener:
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
    address = resolve(store, 0, "127.0.0.1")
    assert address is not None
    return address


def test_only_the_link_of_a_killed_worker_fails() -> None:
    crew = Crew(3)
    try:
        crew.start(_three)
        assert crew.outcomes([0, 2]) == [(True, "well")] * 2
    finally:
        crew.dismiss()


# --- where a shard is


def test_a_shard_beside_the_store_is_reached_where_the_worker_found_the_store() -> None:
    store = dist.HashStore()
    assert resolve(store, 3, "anywhere") is None
    with register(store, 3, "localhost", 9) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1", "it is not open to others"
        assert resolve(store, 3, "node-0.example") == ("node-0.example", port)


def test_a_shard_elsewhere_says_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback plays the network: every address that starts with 127 is this host's."""
    store = dist.HashStore()
    monkeypatch.setattr(addresses.ipaddress.IPv4Address, "is_loopback", False)
    with register(store, 0, "127.0.0.1", 9) as listener:
        assert resolve(store, 0, "node-0.example") == listener.getsockname()


def test_a_user_can_say_where_a_host_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv(ADDRESS, "127.0.0.7")
    with register(store, 0, "localhost", 9) as listener:
        assert resolve(store, 0, "elsewhere") == ("127.0.0.7", listener.getsockname()[1])


def test_beside_a_store_that_others_reach_by_name_a_shard_is_open_to_them() -> None:
    store = dist.HashStore()
    with register(store, 0, "127.0.1.1", 9) as listener:  # as Debian calls a host itself
        assert listener.getsockname()[0] == "0.0.0.0"
        assert resolve(store, 0, "node-0") == ("node-0", listener.getsockname()[1])
