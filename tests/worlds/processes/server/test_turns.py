"""Turns: in order, and nobody waits for a connection that has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offbeat.worlds.processes.server.channel import Pipeline, Request
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.turns import Turns
from tests.support.beside import beside
from tests.support.connections import close, connection_pair
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def test_messages_leave_in_the_order_in_which_they_lined_up() -> None:
    turns, left = Turns(), []

    def leave(message: int) -> None:
        with turns.turn("connection", message):
            left.append(message)

    for message in range(3):
        turns.line_up("connection", message)
    assert turns.has_more
    later = [beside(leave, message) for message in (2, 1)]
    assert not left
    leave(0)
    for each in later:
        each.result(HANG_S)
    assert left == [0, 1, 2] and not turns.has_more
    leave(3)  # which has no place in the line


@pytest.fixture
def pipes() -> Iterator[list[tuple[Connection, Pipeline]]]:
    """Two connections to one host."""
    turns, pairs = Turns(), [connection_pair() for _ in range(2)]
    both = [(shard, Pipeline(worker, turns)) for shard, worker in pairs]
    yield both
    for shard, pipeline in both:
        pipeline.close()
        close(shard)


def push(number: float) -> Request:
    return Request([torch.full((4,), number), torch.full((1 << 20,), number)], [torch.zeros(1)])


def test_a_request_for_tensors_waits_for_nobody(pipes: list[tuple[Connection, Pipeline]]) -> None:
    """The first connection's push cannot leave: nobody reads it. The second's is behind it."""
    (_, first), (shard, second) = pipes
    first.submit(Request([torch.zeros(4), torch.zeros(16 << 20)], [torch.zeros(1)]))
    asked = Request([torch.full((4,), 7.0)], [torch.zeros(1)])
    second.submit(asked)
    shard.send(torch.full((1,), 8.0))
    second.wait(asked, HANG_S)
    came = torch.zeros(4)
    shard.receive(came)
    assert came.tolist() == [7.0] * 4 and asked.answer[0].item() == 8.0


@pytest.mark.parametrize("how", ["breaks", "is closed"])
def test_nobody_waits_for_a_connection_that(how: str, pipes: list[tuple[Connection, Pipeline]]) -> None:
    (ended, first), (shard, second) = pipes
    first.submit(Request([torch.zeros(4), torch.zeros(16 << 20)], [torch.zeros(1)]))
    first.submit(push(1.0))
    behind = push(2.0)
    second.submit(behind)
    if how == "breaks":
        ended.close()
    else:
        first.close()
    head, body = torch.zeros(4), torch.zeros(1 << 20)
    shard.limit(HANG_S)
    shard.receive(head, body)
    assert bool((body == 2.0).all())
    third = push(3.0)
    first.submit(third)  # to the broken one: it takes nobody's turn
    second.submit(push(4.0))
    shard.receive(head, body)
    assert bool((body == 4.0).all())
