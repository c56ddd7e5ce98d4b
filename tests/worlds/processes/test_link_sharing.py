"""How unevenly connections share a link: closed forms, real ranks, and ranks that fail."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch

from offbeat.core.pending import block_on
from offbeat.core.port import Op
from offbeat.errors import LaunchError, RankLost
from offbeat.worlds.processes import link_sharing
from offbeat.worlds.processes.link_sharing import (
    LEAST_BYTES,
    MOST_BYTES,
    PACKET,
    REPEATS,
    SHORTER,
    SHORTEST_S,
    Inflow,
    Spread,
    _accept,
    _exchange,
    measure_link_sharing,
    message_bytes,
    unfairness_of,
)
from offbeat.worlds.processes.port import ProcessPort
from tests.support.crew import Crew
from tests.support.exchanges import process_port
from tests.support.limits import HANG_S
from tests.support.lost import patched

NBYTES = 1 << 18


# --- deviations


def test_the_deviation_is_that_of_logarithms() -> None:
    assert Spread.of([3.0, 3.0, 3.0]).deviation == 0
    assert Spread.of([1.0, math.e]).deviation == pytest.approx(math.sqrt(0.5))
    both = Spread.of([1.0, math.e]) + Spread.of([5.0, 5.0, 5.0])
    assert (both.freedom, both.deviation) == (3, pytest.approx(math.sqrt(0.5 / 3)))
    assert Spread().deviation is None, "nothing was measured"


def same(one: Spread, other: Spread) -> bool:
    return one.freedom == other.freedom and one.squares == pytest.approx(other.squares)


def counted(*counts: tuple[int, int]) -> Inflow:
    inflow = Inflow(3, 100 * PACKET)
    for connection, packets in counts:
        inflow.add(connection, packets * PACKET)
    return inflow


def test_what_counts_is_what_came_while_all_were_in_progress() -> None:
    """The first connection had 30 packets before the last began; then they had 70, 35 and 70."""
    inflow = counted((0, 30), (1, 5), (2, 10), (1, 35), (2, 70), (0, 70), (1, 60), (2, 20))
    assert same(inflow.spread, Spread.of([70.0, 35.0, 70.0]))
    assert inflow.is_complete


def test_a_connection_that_got_nothing_counts_as_one_that_got_a_packet() -> None:
    found = counted((0, 1), (1, 1), (2, 1), (1, 49), (0, 99)).spread
    assert same(found, Spread.of([99.0, 49.0, 1.0]))


def test_nothing_counts_where_one_was_over_before_all_began() -> None:
    inflow = counted((0, 100), (1, 1), (2, 1))
    assert inflow.spread == Spread() and not inflow.is_complete
    assert counted((0, 1), (1, 1)).spread == Spread(), "the last never began"


# --- what a cluster file says


@pytest.mark.parametrize(("unfairness", "unfair_s"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.002), (0.05, 0.001)])
@pytest.mark.parametrize("long_s", [0.02, 0.1])
def test_two_sizes_give_both_numbers(unfairness: float, unfair_s: float, long_s: float) -> None:
    def spread(seconds: float) -> Spread:
        return Spread(unfairness**2 + (unfair_s / seconds) ** 2, 1)

    found = unfairness_of(spread(long_s), spread(long_s / SHORTER), long_s)
    assert found == (pytest.approx(unfairness, abs=1e-8), pytest.approx(unfair_s, abs=1e-9))


def test_where_short_messages_are_nearer_or_unknown_the_long_ones_decide() -> None:
    for short in (Spread(0.01, 1), Spread()):
        assert unfairness_of(Spread(0.04, 1), short, 0.1) == (pytest.approx(0.2), 0.0)


def test_chance_is_no_measurement() -> None:
    assert unfairness_of(Spread(), Spread(0.04, 1), 0.1) is None
    assert unfairness_of(Spread(0.04, 1), Spread(0.04, 1), 0.9 * SHORTEST_S) is None, "a link too fast"
    unfairness, unfair_s = unfairness_of(Spread(9.0, 1), Spread(25.0, 1), 0.1) or (0.0, 0.0)
    assert (unfairness, unfair_s) == (1.0, 0.0), "at most 1"


def test_messages_are_as_long_as_pushes_to_a_shard() -> None:
    assert message_bytes(4 * (LEAST_BYTES + 4), 4) == LEAST_BYTES + 4
    assert message_bytes(1000, 4) == LEAST_BYTES
    assert message_bytes(1 << 40, 4) == MOST_BYTES


# --- messages


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as opened:
        made = [socket.socketpair() for _ in range(3)]
        for pair in made:
            for end in pair:
                opened.enter_context(closing(end))
        yield made


def test_messages_come_while_others_leave(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    """More than fits into any buffer: a rank that sent first and received then would never end."""
    outgoing = [(rank, ours) for rank, (ours, _) in enumerate(pairs)]
    incoming = [(rank, theirs) for rank, (_, theirs) in enumerate(pairs)]
    inflow = _exchange(outgoing, incoming, 8 << 20, HANG_S)
    assert inflow.came == [8 << 20] * 3


def test_who_is_silent_is_named(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (first, _), (second, other), (third, _) = pairs
    other.sendall(bytes(1000))
    with pytest.raises(RankLost, match=r"nothing came from rank 4, 8 for 0 s"):
        _exchange([], [(8, first), (6, second), (4, third)], 1000, 0.01)


def test_who_hangs_up_is_named(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (ours, theirs), *_ = pairs
    theirs.close()
    with pytest.raises(RankLost, match="rank 5 has closed its connection"):
        _exchange([], [(5, ours)], NBYTES, HANG_S)
    with pytest.raises(RankLost, match="the connection to rank 5 broke"):
        _exchange([(5, ours)], [], NBYTES, HANG_S)


def test_strangers_are_turned_away_and_ranks_that_stay_away_are_named() -> None:
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def visit(greeting: bytes) -> socket.socket:
            visitor = opened.enter_context(socket.create_connection(address, HANG_S))
            visitor.sendall(greeting)
            return visitor

        stranger = visit(b"stranger")
        visit(b"one who is 7")
        expected = {b"one who is 7": 7}
        stranger.shutdown(socket.SHUT_WR)
        ((rank, _),) = _accept(listener, expected, time.monotonic() + HANG_S, opened)
        assert rank == 7
        assert stranger.recv(1) == b"", "its connection is ended"
        with pytest.raises(RankLost, match="rank 3, 9 has not connected in time"):
            _accept(listener, {b"9": 9, b"3": 3}, time.monotonic() - 1, opened)


# --- real ranks


def _measured() -> tuple[Spread, Spread]:
    with process_port() as port:
        return measure_link_sharing(port, torch.device("cpu"), partial(_agree, port), NBYTES)


def _agree(port: ProcessPort, fine: bool) -> bool:
    failures = torch.full((1,), float(not fine))

    async def meet() -> None:
        await port.all_reduce(failures, Op.SUM)

    with torch.no_grad():
        block_on(meet())
    return not failures.any()


def _alone(patch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Connect, but for rank 1, to which nobody can; return what is said, and whether ranks still agree."""

    def refuse(*address: Any) -> Any:
        raise OSError("no route")

    patch.setattr(link_sharing, "CONNECT_S", 0.5)
    with process_port() as port:
        if port.rank == 1:
            patch.setattr(link_sharing.socket, "create_connection", refuse)
        with pytest.raises(LaunchError) as said:
            measure_link_sharing(port, torch.device("cpu"), partial(_agree, port), NBYTES)
        return str(said.value), _agree(port, True)


@pytest.mark.processes
def test_if_one_rank_cannot_connect_all_go_on_without(crew: Callable[[int], Crew]) -> None:
    said, agreed = zip(*crew(3).run(patched, _alone), strict=True)
    assert said[1] == "rank 2 cannot be reached at 127.0.0.1: no route"
    assert all(agreed)


def _refused(patch: pytest.MonkeyPatch) -> tuple[str, bool]:
    """Let rank 1 alone fail to connect; return what is said, and whether ranks still agree."""

    def connect(port: ProcessPort, *others: Any) -> Any:
        if port.rank == 1:
            raise LaunchError("no route to rank 2")
        return [], []

    patch.setattr(link_sharing, "_connect", connect)
    with process_port() as port:
        with pytest.raises(LaunchError) as said:
            measure_link_sharing(port, torch.device("cpu"), partial(_agree, port), NBYTES)
        return str(said.value), _agree(port, True)


@pytest.mark.processes
def test_ranks_that_could_connect_go_on_without_too(crew: Callable[[int], Crew]) -> None:
    others = "other ranks could not connect to each other"
    found = crew(3).run(patched, _refused)
    assert found == [(others, True), ("no route to rank 2", True), (others, True)]


@pytest.mark.processes
def test_three_ranks_measure_it_again_and_again(crew: Callable[[int], Crew]) -> None:
    three = crew(3)
    for _ in range(2):
        for spreads in three.run(_measured):
            assert all(spread.freedom <= REPEATS for spread in spreads)


@pytest.mark.processes
def test_two_ranks_share_no_link(crew: Callable[[int], Crew]) -> None:
    assert crew(2).run(_measured) == [(Spread(), Spread())] * 2
