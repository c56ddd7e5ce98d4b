"""The parameter server as a state machine: messages in, answers out, and no network anywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat import ASP, SSP
from offbeat.messages import Answer, Join, Leave, Pull, Push, Refusal, Reply
from offbeat.server import ParameterServer, shares

Server = ParameterServer[Any]


def serving(workers: int, staleness: int | None = None, *weights: Tensor) -> Server:
    """A server with some workers; without a staleness it is ASP's."""
    strategy = ASP() if staleness is None else SSP(staleness=staleness)
    server = ParameterServer(list(weights) or [torch.zeros(3)], strategy.rule())
    for worker in range(workers):
        assert server.handle(Join(worker=worker)) == []
    return server


def push(server: Server, worker: int, clock: int, *update: Tensor) -> list[Answer]:
    return server.handle(Push(worker=worker, clock=clock, update=list(update) or [torch.ones(3)]))


def pull(server: Server, worker: int, clock: int | None) -> list[Answer]:
    return server.handle(Pull(worker=worker, clock=clock))


def step(server: Server, worker: int, clock: int) -> list[int]:
    """Push and pull; who is let on."""
    answers = push(server, worker, clock) + pull(server, worker, clock)
    assert all(isinstance(answer, Reply) for answer in answers)
    return [answer.worker for answer in answers]


# --- folding


def test_updates_are_added_exactly_and_in_place() -> None:
    weights = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5], dtype=torch.float64)]
    server = serving(2, None, *weights)
    assert push(server, 0, 1, torch.tensor([0.25, 0.0, -3.0]), torch.tensor([1e-12])) == []
    assert push(server, 1, 1, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-0.5])) == []
    assert server.weights[0] is weights[0]
    assert weights[0].tolist() == [2.25, 3.0, 1.0]
    assert weights[1].item() == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_changes_nothing_at_all(bad: float, place: int) -> None:
    server = serving(2, 0, torch.ones(3), torch.ones(2))
    update = [torch.full((3,), 0.5), torch.full((2,), 0.5)]
    update[place][1] = bad
    (refusal,) = push(server, 1, 1, *update)
    assert isinstance(refusal, Refusal)
    assert refusal.worker == 1
    assert "clock 1 is not finite" in refusal.reason
    assert server.refused == {1: 1}
    assert all((weight == 1).all() for weight in server.weights)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    server = serving(1, 0)
    assert isinstance(push(server, 0, 1, torch.tensor([math.inf, -math.inf, 0.0]))[0], Refusal)
    assert not server.weights[0].any()


def test_nobody_waits_for_one_who_was_refused() -> None:
    server = serving(2, 0)
    assert step(server, 0, 1) == []
    nan = torch.full((3,), math.nan)
    assert [type(answer) for answer in push(server, 1, 1, nan)] == [Refusal]
    assert [answer.worker for answer in pull(server, 1, 1)] == [0, 1]
    assert push(server, 1, 2, nan) and server.refused == {1: 2}


# --- replies


def test_replies_go_out_with_the_message_that_makes_them_possible() -> None:
    server = serving(3, 0)
    assert step(server, 2, 1) == []
    assert step(server, 0, 1) == []
    assert push(server, 1, 1) == [], "a push alone lets nobody on: its worker has not asked"
    assert pull(server, 1, 1) == [Reply(worker=2), Reply(worker=0), Reply(worker=1)]
    assert (server.weights[0] == 3).all(), "all three read the same, complete sum"
    assert pull(server, 1, None) == [Reply(worker=1)], "nobody is answered twice"


def test_a_read_tells_how_far_behind_the_slowest_is() -> None:
    server = serving(2)
    assert [pull_after_push(server, 0, clock) for clock in (1, 2, 3)] == [1, 2, 3]
    assert pull_after_push(server, 1, 1) == 0, "the slowest itself is behind nobody"
    assert pull_after_push(server, 0, 4) == 3
    assert pull(server, 0, None) == [Reply(worker=0, behind=0)]


def pull_after_push(server: Server, worker: int, clock: int) -> int:
    assert push(server, worker, clock) == []
    (reply,) = pull(server, worker, clock)
    assert isinstance(reply, Reply) and reply.worker == worker
    return reply.behind


def test_whoever_wants_the_weights_as_they_are_gets_them() -> None:
    server = serving(2, 0)
    assert pull(server, 1, None) == [Reply(worker=1)]
    assert step(server, 0, 1) == []
    assert pull(server, 1, None) == [Reply(worker=1)]


# --- coming and going


def test_the_slowest_leaves_and_the_others_go_on() -> None:
    server = serving(3, 1)
    assert step(server, 0, 1) == [0]
    assert step(server, 1, 1) == [1]
    assert step(server, 0, 2) == step(server, 1, 2) == []
    assert server.handle(Leave(worker=2)) == [Reply(worker=0), Reply(worker=1)]


def test_one_who_left_gets_no_answer_and_may_leave_twice() -> None:
    server = serving(2, 0)
    assert step(server, 0, 1) == []
    assert server.handle(Leave(worker=0)) == []
    assert server.handle(Leave(worker=0)) == []
    assert server.handle(Leave(worker=7)) == [], "or never have come"
    assert step(server, 1, 1) == [1]


def test_a_push_that_its_worker_did_not_live_to_follow_stays_but_counts_for_nobody() -> None:
    server = serving(2, 0)
    assert push(server, 1, 1) == []
    assert step(server, 0, 1) == []
    assert server.handle(Leave(worker=1)) == [Reply(worker=0)]
    assert (server.weights[0] == 2).all()
    assert step(server, 0, 2) == [0]
    server.handle(Join(worker=1))
    assert pull(server, 1, 2) == [Reply(worker=1)], "nor in a second life"
    assert server.state.of == {0: 2, 1: 2}


def test_a_newcomer_has_the_clock_of_the_slowest() -> None:
    server = serving(2, 1)
    for clock in (1, 2, 3):
        assert step(server, 0, clock) + step(server, 1, clock) == [0, 1]
    assert step(server, 0, 4) == [0]
    server.handle(Join(worker=2))
    assert server.state.of == {0: 4, 1: 3, 2: 3}
    assert step(server, 1, 4) == [1]
    assert step(server, 1, 5) == [], "the newcomer is waited for, like anybody"
    assert step(server, 2, 4) == [1, 2]


def test_the_last_one_leaves_and_one_comes_back() -> None:
    server = serving(1, 0)
    assert step(server, 0, 1) == [0]
    server.handle(Leave(worker=0))
    server.handle(Join(worker=0))
    assert step(server, 0, 1) == [0]
    assert (server.weights[0] == 2).all()


# --- shares


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 9))
def test_shares_cover_every_element_once_and_evenly(sizes: list[int], shards: int) -> None:
    flats = [torch.zeros(size) for size in sizes]
    parts = shares(flats, shards)
    assert len(parts) == shards
    for part in parts:
        for piece in part:
            piece.add_(1)
    assert all((flat == 1).all() for flat in flats), "the pieces are views"
    for each in zip(*parts, strict=True):
        lengths = [piece.numel() for piece in each]
        assert max(lengths) - min(lengths) <= 1
    for flat in flats:
        flat.copy_(torch.arange(flat.numel()))
    for flat, *pieces in zip(flats, *parts, strict=True):
        assert torch.equal(torch.cat(pieces), flat), "in order"
