"""The parameter server as a state machine: messages in, answers out, and no network anywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from offbeat import ASP, SSDSGD, SSP
from offbeat.server.messages import Answer, Join, JoinAck, Leave, Pull, PullReply, Push, PushAck
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState

Server = ParameterServer


def serving(workers: int, staleness: int | None = None, *weights: Tensor) -> Server:
    """A server with some workers; without a staleness it is ASP's."""
    strategy = ASP() if staleness is None else SSP(staleness=staleness)
    server = ParameterServer(ShardState(list(weights) or [torch.zeros(3)]), strategy.server_half())
    for worker in range(workers):
        assert server.handle(Join(worker=worker)) == [JoinAck(worker=worker, clock=0)]
    return server


def push(server: Server, worker: int, clock: int, *update: Tensor) -> list[Answer]:
    return server.handle(Push(worker=worker, clock=clock, update=list(update) or [torch.ones(3)]))


def pull(server: Server, worker: int, clock: int | None) -> list[Answer]:
    return server.handle(Pull(worker=worker, clock=clock))


def step(server: Server, worker: int, clock: int) -> list[int]:
    """Push and pull; who is let on."""
    assert push(server, worker, clock) == taken(worker, clock)
    answers = pull(server, worker, clock)
    assert all(isinstance(answer, PullReply) for answer in answers)
    return [answer.worker for answer in answers]


def taken(worker: int, clock: int) -> list[Answer]:
    """What a push is answered with, and nobody else is told anything."""
    return [PushAck(worker=worker, clock=clock)]


# --- folding


def test_updates_are_added_exactly_and_in_place() -> None:
    weights = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5], dtype=torch.float64)]
    server = serving(2, None, *weights)
    assert push(server, 0, 1, torch.tensor([0.25, 0.0, -3.0]), torch.tensor([1e-12])) == taken(0, 1)
    assert push(server, 1, 1, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-0.5])) == taken(1, 1)
    assert server.weights[0] is weights[0]
    assert weights[0].tolist() == [2.25, 3.0, 1.0]
    assert weights[1].item() == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_changes_nothing_at_all(bad: float, place: int) -> None:
    server = serving(2, 0, torch.ones(3), torch.ones(2))
    update = [torch.full((3,), 0.5), torch.full((2,), 0.5)]
    update[place][1] = bad
    (receipt,) = push(server, 1, 1, *update)
    assert isinstance(receipt, PushAck)
    assert (receipt.worker, receipt.clock) == (1, 1)
    assert "clock 1 is not finite" in receipt.refused
    assert server.refused == {1: 1}
    assert all((weight == 1).all() for weight in server.weights)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    server = serving(1, 0)
    (receipt,) = push(server, 0, 1, torch.tensor([math.inf, -math.inf, 0.0]))
    assert isinstance(receipt, PushAck) and receipt.refused
    assert not server.weights[0].any()


def test_nobody_waits_for_one_who_was_refused() -> None:
    server = serving(2, 0)
    assert step(server, 0, 1) == []
    nan = torch.full((3,), math.nan)
    (receipt,) = push(server, 1, 1, nan)
    assert isinstance(receipt, PushAck) and receipt.refused
    assert [answer.worker for answer in pull(server, 1, 1)] == [0, 1]
    assert push(server, 1, 2, nan) and server.refused == {1: 2}


# --- replies


def test_replies_go_out_with_the_message_that_makes_them_possible() -> None:
    server = serving(3, 0)
    assert step(server, 2, 1) == []
    assert step(server, 0, 1) == []
    assert push(server, 1, 1) == taken(1, 1), "a push alone lets nobody on: its worker has not asked"
    assert pull(server, 1, 1) == [PullReply(worker=2), PullReply(worker=0), PullReply(worker=1)]
    assert (server.weights[0] == 3).all(), "all three read the same, complete sum"
    assert pull(server, 1, None) == [PullReply(worker=1)], "nobody is answered twice"


def test_a_read_tells_how_far_behind_the_slowest_is() -> None:
    server = serving(2)
    assert [pull_after_push(server, 0, clock) for clock in (1, 2, 3)] == [1, 2, 3]
    assert pull_after_push(server, 1, 1) == 0, "the slowest itself is behind nobody"
    assert pull_after_push(server, 0, 4) == 3
    assert pull(server, 0, None) == [PullReply(worker=0, staleness=0)]


def pull_after_push(server: Server, worker: int, clock: int) -> int:
    assert push(server, worker, clock) == taken(worker, clock)
    (reply,) = pull(server, worker, clock)
    assert isinstance(reply, PullReply) and reply.worker == worker
    return reply.staleness


def test_whoever_wants_the_weights_as_they_are_gets_them() -> None:
    server = serving(2, 0)
    assert pull(server, 1, None) == [PullReply(worker=1)]
    assert step(server, 0, 1) == []
    assert pull(server, 1, None) == [PullReply(worker=1)]


# --- coming and going


def test_the_slowest_leaves_and_the_others_go_on() -> None:
    server = serving(3, 1)
    assert step(server, 0, 1) == [0]
    assert step(server, 1, 1) == [1]
    assert step(server, 0, 2) == step(server, 1, 2) == []
    assert server.handle(Leave(worker=2)) == [PullReply(worker=0), PullReply(worker=1)]


def test_one_who_left_gets_no_answer_and_may_leave_twice() -> None:
    server = serving(2, 0)
    assert step(server, 0, 1) == []
    assert server.handle(Leave(worker=0)) == []
    assert server.handle(Leave(worker=0)) == []
    assert server.handle(Leave(worker=7)) == [], "or never have come"
    assert step(server, 1, 1) == [1]


def test_a_push_that_its_worker_did_not_live_to_follow_stays_but_counts_for_nobody() -> None:
    server = serving(2, 0)
    assert push(server, 1, 1) == taken(1, 1)
    assert step(server, 0, 1) == []
    assert server.handle(Leave(worker=1)) == [PullReply(worker=0)]
    assert (server.weights[0] == 2).all()
    assert step(server, 0, 2) == [0]
    assert server.handle(Join(worker=1)) == [JoinAck(worker=1, clock=2)]
    assert pull(server, 1, 2) == [PullReply(worker=1)], "nor in a second life"
    assert server.state.of == {0: 2, 1: 2}


def test_a_newcomer_has_the_clock_of_the_slowest() -> None:
    server = serving(2, 1)
    for clock in (1, 2, 3):
        assert step(server, 0, clock) + step(server, 1, clock) == [0, 1]
    assert step(server, 0, 4) == [0]
    assert server.handle(Join(worker=2)) == [JoinAck(worker=2, clock=3)]
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


# --- sent again, lost, started again


def test_a_push_that_is_sent_again_is_acknowledged_but_not_folded_again() -> None:
    server = serving(2, 0)
    assert push(server, 0, 1) == push(server, 0, 1) == taken(0, 1)
    assert server.handle(Join(worker=0, clock=0)) == [JoinAck(worker=0, clock=0)], "it missed the receipt"
    assert push(server, 0, 1) == taken(0, 1)
    assert pull(server, 0, 1) == []
    assert step(server, 1, 1) == [0, 1], "and counts in the clocks"
    assert (server.weights[0] == 2).all()
    assert step(server, 0, 2) == [], "what comes next is new"
    assert (server.weights[0] == 3).all()


def test_a_refused_push_that_is_sent_again_is_not_taken_either() -> None:
    server = serving(1, 0)
    push(server, 0, 1, torch.full((3,), math.nan))
    assert push(server, 0, 1) == taken(0, 1)
    assert not server.weights[0].any() and server.refused == {0: 1}


@pytest.mark.parametrize(("clock", "applied", "lost"), [(5, 3, 2), (3, 3, 0), (3, 4, 0), (1, 0, 1)])
def test_what_was_acknowledged_but_is_not_in_memory_is_lost(clock: int, applied: int, lost: int) -> None:
    """And what comes next is new, unless it is in memory: then it was sent again."""
    server = ParameterServer(
        ShardState([torch.zeros(3)], {7: applied} if applied else {}), SSP().server_half()
    )
    assert server.handle(Join(worker=7, clock=clock)) == [JoinAck(worker=7, clock=clock, lost=lost)]
    assert server.handle(Join(worker=7, clock=clock)) == [JoinAck(worker=7, clock=clock)], "told once"
    assert push(server, 7, clock + 1) == taken(7, clock + 1)
    assert (server.weights[0] == (clock + 1 > applied)).all()
    assert server.handle(Join(worker=7, clock=clock + 1)) == [JoinAck(worker=7, clock=clock + 1)]


def test_who_comes_back_has_its_clock_and_a_newcomer_the_slowest() -> None:
    server = serving(2, 1)
    for clock in (1, 2, 3):
        assert step(server, 0, clock) + step(server, 1, clock) == [0, 1]
    server.handle(Leave(worker=0))
    assert step(server, 1, 4) == [1]
    assert server.handle(Join(worker=0, clock=3)) == [JoinAck(worker=0, clock=3)]
    assert server.handle(Join(worker=2)) == [JoinAck(worker=2, clock=3)]
    assert server.state.of == {0: 3, 1: 4, 2: 3}
    assert server.shard.applied == {0: 3, 1: 4, 2: 3}
    assert step(server, 1, 5) == []
    assert step(server, 0, 4) == [0]
    assert step(server, 2, 4) == [1, 2], "both were waited for"


def test_what_was_asked_for_in_an_earlier_life_is_not_answered_in_the_next() -> None:
    """Its link broke while it waited. It will ask again; an answer to the first question would be taken for
    one to the next, and lack the worker's own push."""
    server = serving(2, 0)
    assert step(server, 0, 1) == []
    assert server.handle(Join(worker=0, clock=1)) == [JoinAck(worker=0, clock=1)]
    assert step(server, 1, 1) == [1], "it has not asked in this life"
    assert pull(server, 0, 1) == [PullReply(worker=0)]
    assert step(server, 1, 2) == [], "nor did it push again"


def test_starting_again_counts_anew_with_the_same_workers() -> None:
    server = serving(3, 1)
    for worker in (0, 1):
        assert step(server, worker, 1) == [worker]
    server.handle(Leave(worker=1))
    assert push(server, 0, 2) == taken(0, 2)
    server.weights[0].zero_()
    server.restart(server.weights)
    assert server.state.of == server.shard.applied == {0: 0, 2: 0}
    assert pull(server, 0, 0) == [PullReply(worker=0)], "the push of before does not count any more"
    assert server.state.of == {0: 0, 2: 0}
    assert step(server, 0, 1) == [0] and step(server, 0, 2) == []
    assert step(server, 2, 1) == [0, 2]
    assert (server.weights[0] == 3).all(), "clocks begin at 1 again, and are folded"


# --- who was away for so long that others trained on


def test_one_who_was_fenced_comes_back_at_the_slowest_clock_and_its_stale_push_is_dropped() -> None:
    server = serving(3, 1)
    for clock in (1, 2):
        assert sorted(step(server, 0, clock) + step(server, 1, clock) + step(server, 2, clock)) == [0, 1, 2]
    server.handle(Leave(worker=2))  # it was silent
    for clock in range(3, 40):
        assert step(server, 0, clock) + step(server, 1, clock) == [0, 1]
    before = server.weights[0].clone()
    assert server.handle(Join(worker=2, clock=2, fenced=True)) == [JoinAck(worker=2, clock=39)]
    (dropped,) = push(server, 2, 3)
    assert isinstance(dropped, PushAck) and "others had trained on without this worker" in dropped.refused
    assert torch.equal(server.weights[0], before)
    assert [answer.worker for answer in pull(server, 2, 3)] == [2], "it gets fresh weights at once"
    assert step(server, 0, 40) == [0], "nobody waits until it has caught up"
    assert step(server, 2, 40) == [2]
    assert torch.equal(server.weights[0], before + 2), "its next push is a push like any other"


def test_a_push_that_was_applied_before_the_fence_is_acknowledged_as_applied() -> None:
    server = serving(2, 1)
    assert push(server, 1, 1) == taken(1, 1)  # and the worker misses the ack
    server.handle(Leave(worker=1))
    for clock in (1, 2, 3):
        assert step(server, 0, clock) == [0]
    assert server.handle(Join(worker=1, clock=0, fenced=True)) == [JoinAck(worker=1, clock=3)]
    assert push(server, 1, 1) == taken(1, 1)
    assert (server.weights[0] == 4).all(), "once"


def test_one_who_was_away_but_is_not_behind_keeps_its_clock() -> None:
    server = serving(2, 3)
    for clock in (1, 2):
        assert step(server, 1, clock) == [1]
    server.handle(Leave(worker=1))
    assert server.handle(Join(worker=1, clock=2, fenced=True)) == [JoinAck(worker=1, clock=2)]
    assert step(server, 1, 3) == [1]
    assert (server.weights[0] == 3).all()


def test_in_lock_step_a_stale_push_does_not_enter_the_mean_of_a_later_round() -> None:
    half = SSDSGD(on="server", warmup=0).server_half()
    server = ParameterServer(ShardState([torch.zeros(3)]), half)  # type: ignore[arg-type]
    for worker in (0, 1):
        server.handle(Join(worker=worker))
    server.handle(Leave(worker=1))
    for clock in (1, 2):
        push(server, 0, clock)
    before = server.weights[0].clone()
    assert server.handle(Join(worker=1, clock=0, fenced=True)) == [JoinAck(worker=1, clock=2)]
    (dropped,) = push(server, 1, 1)
    assert isinstance(dropped, PushAck) and dropped.refused
    assert torch.equal(server.weights[0], before)


def test_of_one_who_came_after_the_snapshot_only_its_own_pushes_are_lost() -> None:
    """It came when the slowest stood at 500, and has pushed three times; this memory never heard of it."""
    server = serving(1)
    (welcome,) = server.handle(Join(worker=9, clock=503, pushes=3))
    assert welcome == JoinAck(worker=9, clock=503, lost=3)
    (receipt,) = push(server, 9, 504)
    assert receipt == PushAck(worker=9, clock=504)
    assert (server.weights[0] == 1).all()
