"""Queues of links: closed forms, real ranks, and ranks that fail."""

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
from offbeat.worlds.processes import link_queues
from offbeat.worlds.processes.link_queues import (
    LEAST_BYTES,
    LOAD_S,
    LOADS,
    MOST_BYTES,
    Exchange,
    Links,
    PeerConnection,
    _accept,
    load_bytes,
    measure_queue,
    queue_of,
    receivers,
)
from offbeat.worlds.processes.port import ProcessPort
from tests.support.crew import Crew
from tests.support.exchanges import process_port
from tests.support.limits import HANG_S
from tests.support.lost import patched

NBYTES = 1 << 18


# --- closed forms


def test_a_queue_is_what_probes_wait_in_the_fullest_quarter_of_the_time() -> None:
    """Probes that follow each other: 0.3 s of 100 ms each, 0.7 s of 10 ms each."""
    loaded = [0.1] * 3 + [0.01] * 70
    assert queue_of([0.002, 0.001, 0.9], loaded) == pytest.approx(0.1 - 0.002), "of many short ones, too"
    assert queue_of([0.002], [0.1] * 2 + [0.01] * 80) == pytest.approx(0.01 - 0.002), (
        "it was full too shortly"
    )
    assert queue_of([0.5], loaded) == 0, "chance is no queue"


def test_receivers_are_spread() -> None:
    assert [receivers(world) for world in (1, 2, 3, 4, 64)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
        [0, 21, 42],
    ]


def test_a_load_lasts_unless_links_are_fast() -> None:
    assert load_bytes(50e6) == int(LOAD_S * 50e6 / 8)
    assert load_bytes(1e3) == LEAST_BYTES
    assert load_bytes(math.inf) == MOST_BYTES


# --- loads and probes


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    with ExitStack() as opened:
        made = [socket.socketpair() for _ in range(3)]
        for pair in made:
            for end in pair:
                opened.enter_context(closing(end))
        yield made


def test_loads_come_while_others_leave(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    """More than fits into any buffer: a rank that sent first and received then would never end."""
    outgoing = [PeerConnection(rank, ours) for rank, (ours, _) in enumerate(pairs)]
    incoming = [PeerConnection(rank, theirs) for rank, (_, theirs) in enumerate(pairs)]
    assert Exchange(Links(outgoing, incoming), 8 << 20, 1, HANG_S).run() == []


def test_probes_go_there_and_back_until_the_load_is_there(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    """This rank is its own neighbour: it sends its probes back itself."""
    (ours, theirs), (probing, probed), _ = pairs
    links = Links(
        [PeerConnection(1, ours)],
        [PeerConnection(2, theirs)],
        PeerConnection(1, probing),
        PeerConnection(2, probed),
    )
    took = Exchange(links, NBYTES, 5, HANG_S).run()
    assert len(took) >= 5 and min(took) > 0
    assert Exchange(links.probes_only(), 0, 3, HANG_S).run()[3:] == [], "no more than asked for"


def test_only_one_rank_receives(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (first, second), (third, fourth), (fifth, sixth) = pairs
    one, two = PeerConnection(1, first), PeerConnection(2, second)
    links = Links(
        [one, two],
        [PeerConnection(2, third), PeerConnection(3, fourth)],
        PeerConnection(1, fifth),
        PeerConnection(3, sixth),
    )
    assert links.towards(0, 0) == Links(incoming=links.incoming, probing=links.probing)
    assert links.towards(1, 0) == Links(outgoing=[one])
    assert links.towards(3, 0) == Links(probed=links.probed), "it sends the probes of rank 3 back"


def test_who_is_silent_is_named(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (first, _), (second, other), (third, _) = pairs
    other.sendall(bytes(1000))
    incoming = [PeerConnection(8, first), PeerConnection(6, second)]
    with pytest.raises(RankLost, match=r"nothing came from rank 4, 8 for 0 s"):
        Exchange(Links(incoming=incoming, probed=PeerConnection(4, third)), 1000, 1, 0.01).run()
    with pytest.raises(RankLost, match=r"nothing came from rank 4 for 0 s"):
        Exchange(Links(probing=PeerConnection(4, third)), 1000, 1, 0.01).run()


def test_who_hangs_up_is_named(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (ours, theirs), *_ = pairs
    theirs.close()
    with pytest.raises(RankLost, match="rank 5 has closed its connection"):
        Exchange(Links(incoming=[PeerConnection(5, ours)]), NBYTES, 1, HANG_S).run()
    with pytest.raises(RankLost, match="the connection to rank 5 broke"):
        Exchange(Links(outgoing=[PeerConnection(5, ours)]), NBYTES, 1, HANG_S).run()


def test_strangers_are_turned_away_and_ranks_that_stay_away_are_named() -> None:
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def visit(greeting: bytes) -> socket.socket:
            visitor = opened.enter_context(socket.create_connection(address, HANG_S))
            visitor.sendall(greeting)
            return visitor

        stranger = visit(b"stranger")
        visit(b"one who is 7")
        expected = {b"one who is 7": (7, LOADS)}
        stranger.shutdown(socket.SHUT_WR)
        ((purpose, accepted),) = _accept(listener, expected, time.monotonic() + HANG_S, opened)
        assert (purpose, accepted.rank) == (LOADS, 7)
        assert stranger.recv(1) == b"", "its connection is ended"
        with pytest.raises(RankLost, match="rank 3, 9 has not connected in time"):
            _accept(listener, {b"9": (9, LOADS), b"3": (3, LOADS)}, time.monotonic() - 1, opened)


# --- real ranks


def _measured() -> float | None:
    with process_port() as port:
        return measure_queue(port, torch.device("cpu"), partial(_agree, port), NBYTES)


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

    patch.setattr(link_queues, "CONNECT_S", 0.5)
    with process_port() as port:
        if port.rank == 1:
            patch.setattr(link_queues.socket, "create_connection", refuse)
        with pytest.raises(LaunchError) as said:
            measure_queue(port, torch.device("cpu"), partial(_agree, port), NBYTES)
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
        return Links()

    patch.setattr(link_queues, "_connect", connect)
    with process_port() as port:
        with pytest.raises(LaunchError) as said:
            measure_queue(port, torch.device("cpu"), partial(_agree, port), NBYTES)
        return str(said.value), _agree(port, True)


@pytest.mark.processes
def test_ranks_that_could_connect_go_on_without_too(crew: Callable[[int], Crew]) -> None:
    others = "other ranks could not connect to each other"
    found = crew(3).run(patched, _refused)
    assert found == [(others, True), ("no route to rank 2", True), (others, True)]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_measure_it_again_and_again(crew: Callable[[int], Crew], ranks: int) -> None:
    several = crew(ranks)
    for _ in range(2):
        assert all(queue_s is not None and queue_s >= 0 for queue_s in several.run(_measured))


@pytest.mark.processes
def test_of_four_ranks_the_last_does_not_receive(crew: Callable[[int], Crew]) -> None:
    assert [queue_s is None for queue_s in crew(4).run(_measured)] == [False, False, False, True]
