"""A worker's channel to a shard: answers in order, and requests sent again over a new connection."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from offbeat.errors import RankLost
from offbeat.worlds.processes.server.auth import challenge
from offbeat.worlds.processes.server.channel import ClientIdentity, Pipeline, Request, ShardChannel
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.discovery import register
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.wire import HEADER, NEW, MessageType, encode_header
from tests.support.beside import beside, post
from tests.support.connections import close, connection_pair
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def number(value: float = 0.0) -> torch.Tensor:
    return torch.tensor([value])


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Pipeline]]:
    """The shard's end, and the worker's end in use."""
    shard, worker = connection_pair()
    pipeline = Pipeline(worker)
    yield shard, pipeline
    pipeline.close()
    close(shard)


def test_requests_travel_while_no_answer_has_come(pair: tuple[Connection, Pipeline]) -> None:
    shard, pipeline = pair
    requests = [Request([number(value)], [number()]) for value in (1.0, 2.0, 3.0)]
    for request in requests:
        pipeline.submit(request)
    came = [number() for _ in requests]
    shard.receive(*came)
    assert [value.item() for value in came] == [1.0, 2.0, 3.0]
    shard.send(number(10.0), number(20.0), number(30.0))
    for request in reversed(requests):
        pipeline.wait(request, HANG_S)
    assert [request.answer[0].item() for request in requests] == [10.0, 20.0, 30.0]
    assert all(request.ended_s >= request.began_s > 0 for request in requests)


def test_what_is_not_ready_is_not_sent(pair: tuple[Connection, Pipeline]) -> None:
    shard, pipeline = pair
    message = number(1.0)
    pipeline.submit(Request([message], [], await_ready=lambda: message.fill_(2.0)))
    came = number()
    shard.receive(came)
    assert came.item() == 2.0


def test_a_broken_connection_fails_all_requests(pair: tuple[Connection, Pipeline]) -> None:
    shard, pipeline = pair
    requests = [Request([number()], [number()]) for _ in range(2)]
    for request in requests:
        pipeline.submit(request)
    shard.close()
    for request in requests:
        with pytest.raises(OSError, match=r"the other end is gone|reset|Broken pipe"):
            pipeline.wait(request, HANG_S)


def test_a_shard_that_does_not_answer_is_not_waited_for(pair: tuple[Connection, Pipeline]) -> None:
    _, pipeline = pair
    request = Request([number()], [number()])
    pipeline.submit(request)
    with pytest.raises(TimeoutError, match="no answer"):
        pipeline.wait(request, 0.01)


def test_a_last_request_is_sent_before_the_end() -> None:
    shard, worker = connection_pair()
    Pipeline(worker).close(Request([encode_header(MessageType.LEAVE)], []))
    head = torch.zeros(HEADER, dtype=torch.int64)
    shard.receive(head)
    assert head.tolist() == [MessageType.LEAVE, 0, 0, 0, 0]
    close(shard)


# --- over a real shard


def header(kind: MessageType, *numbers: int, payload: float | None = None) -> Request:
    message = [encode_header(kind, *numbers)]
    if payload is not None:
        message.append(torch.full((4,), payload))
    answer = [torch.zeros(HEADER, dtype=torch.int64)]
    return Request(message, [*answer, torch.zeros(4)] if kind is MessageType.PULL else answer)


def test_what_was_in_progress_is_sent_again_and_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shard = ShardServer(post(tmp_path, [("float32", 4)]), dist.HashStore(), b"secret")
    ran = beside(shard.run)
    identity = ClientIdentity(shard.store, "127.0.0.1", 0, b"secret", HANG_S)
    channel = ShardChannel(identity, 0, "shard 0")

    def ask(request: Request) -> list[int]:
        assert channel.finish(channel.start(request), monotonic() + HANG_S) is None
        return request.header

    ask(header(MessageType.LOAD, payload=1.0))
    assert ask(header(MessageType.PUSH, 1, payload=0.5))[:3] == [MessageType.PUSH_ACK, 1, 0]
    assert channel.has_weights
    assert channel._pipeline is not None
    channel._pipeline._connection.end()  # as when the network fails
    channel.clock, channel.pushes = 1, 1
    with caplog.at_level(logging.WARNING):
        assert ask(header(MessageType.PUSH, 1, payload=0.5))[:3] == [MessageType.PUSH_ACK, 1, 0]
    assert "connection to shard 0 lost, reconnecting" in caplog.text
    pull = header(MessageType.PULL, 1)
    ask(pull)
    assert pull.answer[1].tolist() == [1.5] * 4, "the same push, though sent twice"
    channel.leave()
    ran.result(HANG_S)


def test_a_shard_that_falls_silent_is_named_with_the_seconds() -> None:
    store, head = dist.HashStore(), torch.zeros(HEADER, dtype=torch.int64)

    def admit() -> Connection:
        connection = Connection(listener.accept()[0], HANG_S)
        assert challenge(connection, b"secret")
        connection.receive(head)
        connection.send(encode_header(MessageType.JOIN_ACK, 4, 0, 1))
        return connection

    listener, _ = register(store, b"secret", 0, "127.0.0.1", 9)
    with listener:
        admitted = beside(admit)
        channel = ShardChannel(ClientIdentity(store, "127.0.0.1", 7, b"secret", HANG_S), 0, "shard 0")
        silent = admitted.result(HANG_S)
        assert head.tolist() == [MessageType.JOIN, 7, NEW, 0, 0]
        assert (channel.clock, channel.has_weights) == (4, True), "as the shard has said"
        lost = channel.finish(channel.start(header(MessageType.PULL, 4)), monotonic())
        assert isinstance(lost, RankLost)
        assert str(lost) == f"shard 0 did not answer for {HANG_S:.0f} s"
        channel.leave()
        close(silent)
