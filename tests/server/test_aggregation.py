"""A server whose pushes wait for each other, and one that adds up: messages in, answers out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import OSP, SSDSGD, SettingError
from offbeat.core.port import Op
from offbeat.server.aggregation import Barrier, ReduceOnly
from offbeat.server.half import ServerHalf
from offbeat.server.messages import (
    Answer,
    Join,
    JoinAck,
    Leave,
    Pull,
    PullReply,
    Push,
    PushAck,
    Reduce,
    ReduceReply,
)
from offbeat.server.rule import LockStep, Unbounded
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState

Server = ParameterServer
LOCKSTEP = ServerHalf(rule=LockStep(), aggregation=Barrier)
REDUCE_ONLY = ServerHalf(rule=Unbounded(), aggregation=ReduceOnly)


def serving(workers: int, rule: Any) -> Server:
    server = ParameterServer(ShardState([torch.zeros(2)]), rule)
    for worker in range(workers):
        server.handle(Join(worker=worker))
    return server


def push(server: Server, worker: int, clock: int, value: float = 1.0) -> list[Answer]:
    return server.handle(Push(worker=worker, clock=clock, update=[torch.full((2,), value)], report=(worker,)))


def receipts(clock: int, *workers: int) -> list[Answer]:
    return [PushAck(worker=worker, clock=clock) for worker in workers]


def weight(server: Server) -> float:
    return float(server.weights[0][0])


# --- pushes that wait for each other


def test_the_mean_is_folded_in_once_and_only_then_are_pushes_acknowledged() -> None:
    server = serving(3, LOCKSTEP)
    assert push(server, 2, 1, 6.0) == push(server, 0, 1, 1.0) == []
    assert server.handle(Pull(worker=0, clock=1)) == [], "its push is not in the weights yet"
    assert server.handle(Pull(worker=2, clock=None)) == [PullReply(worker=2)]
    assert weight(server) == 0 and server.applied_clocks == {0: 0, 1: 0, 2: 0}
    assert push(server, 1, 1, 2.0) == [*receipts(1, 0, 1, 2), PullReply(worker=0)]
    assert weight(server) == 3 and server.applied_clocks == {0: 1, 1: 1, 2: 1}


def test_figures_are_the_largest_and_nothing_depends_on_who_was_first() -> None:
    seen = []
    values = [0.1, 0.7, -0.3]
    for order in ((0, 1, 2), (2, 0, 1)):
        server = serving(3, LOCKSTEP)
        server.aggregation.apply = lambda weights, push: seen.append((push.update[0].clone(), push.report))
        for worker in order:
            push(server, worker, 1, values[worker])
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1] == (2,)


def test_what_is_not_finite_is_left_out_and_told() -> None:
    server = serving(2, LOCKSTEP)
    assert push(server, 0, 1, math.nan) == []
    refused, taken = push(server, 1, 1, 4.0)
    assert isinstance(refused, PushAck) and "clock 1 is not finite" in refused.refused
    assert taken == PushAck(worker=1, clock=1)
    assert weight(server) == 4 and server.refused == {0: 1}
    assert push(server, 0, 2, math.nan) == [] and len(push(server, 1, 2, math.inf)) == 2
    assert weight(server) == 4, "a step without anything to step with"


def test_nobody_waits_for_one_who_has_left_but_what_it_pushed_counts() -> None:
    server = serving(3, LOCKSTEP)
    assert push(server, 2, 1, 6.0) == push(server, 0, 1, 2.0) == []
    assert server.handle(Leave(worker=2)) == []
    assert push(server, 1, 1, 1.0) == receipts(1, 0, 1, 2)
    assert weight(server) == 3
    assert push(server, 0, 2, 1.0) == []
    assert server.handle(Leave(worker=1)) == receipts(2, 0)
    assert server.rule.members(server.state) == [0], "nor does its last step bring it back"


def test_a_push_that_is_sent_again_waits_with_the_others_or_is_acknowledged() -> None:
    server = serving(2, LOCKSTEP)
    assert push(server, 0, 1, 2.0) == []
    assert server.handle(Leave(worker=0)) == []
    assert server.handle(Join(worker=0, clock=0)) == [JoinAck(worker=0, clock=0)], "it missed the receipt"
    assert push(server, 0, 1, 2.0) == []
    assert push(server, 1, 1, 4.0) == receipts(1, 0, 1)
    assert weight(server) == 3
    server.handle(Join(worker=0, clock=0))
    assert push(server, 0, 1, 2.0) == receipts(1, 0)
    assert server.handle(Pull(worker=0, clock=1)) == [PullReply(worker=0)]
    assert weight(server) == 3


def test_a_newcomer_is_waited_for() -> None:
    server = serving(1, LOCKSTEP)
    assert push(server, 0, 1) == receipts(1, 0)
    assert server.handle(Join(worker=1)) == [JoinAck(worker=1, clock=1)]
    assert push(server, 0, 2) == []
    assert push(server, 1, 2) == receipts(2, 0, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["push"] * 6 + ["mend"])), max_size=60))
def test_every_push_is_folded_exactly_once(schedule: list[tuple[int, str]]) -> None:
    """Links break at any moment; a worker then comes back and sends again what was not acknowledged."""
    server = serving(3, LOCKSTEP)
    clocks, pushed = [0, 0, 0], [0, 0, 0]
    folded: list[tuple[int, int]] = []
    assert isinstance(server.aggregation, Barrier)
    mean = server.aggregation._mean_of

    def seen(pushes: list[Push]) -> Push:
        folded.extend((push.worker, push.clock) for push in pushes)
        return mean(pushes)

    server.aggregation._mean_of = seen  # type: ignore[method-assign]

    def heed(answers: list[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, PushAck):
                clocks[answer.worker] = answer.clock

    for worker, act in schedule:
        waits = pushed[worker] > clocks[worker]
        if act == "mend":
            heed(server.handle(Leave(worker=worker)))
            heed(server.handle(Join(worker=worker, clock=clocks[worker])))
        if waits == (act == "mend"):
            pushed[worker] = clocks[worker] + 1
            heed(push(server, worker, pushed[worker]))
        assert len(folded) == len(set(folded))
        assert set(folded) >= {(w, c) for w in range(3) for c in range(1, clocks[w] + 1)}
        assert max(pushed) - min(clocks) <= 2 + sum(each == "mend" for _, each in schedule)


# --- sums


def bring(server: Server, worker: int, number: int, value: float, op: Op = Op.MEAN) -> list[Answer]:
    return server.handle(Reduce(worker=worker, number=number, op=op, tensor=torch.tensor([value])))


def totals(answers: list[Answer]) -> dict[int, float]:
    assert all(isinstance(answer, ReduceReply) for answer in answers)
    return {answer.worker: answer.tensor.item() for answer in answers if isinstance(answer, ReduceReply)}


@pytest.mark.parametrize(("op", "total"), [(Op.MEAN, 3.0), (Op.SUM, 9.0), (Op.MAX, 6.0)])
def test_a_sum_is_answered_once_all_have_brought_their_term(op: Op, total: float) -> None:
    server = serving(3, REDUCE_ONLY)
    assert bring(server, 1, 1, 1.0, op) == bring(server, 2, 1, 6.0, op) == []
    assert bring(server, 1, 2, 0.0, op) == [], "the next may be begun before"
    assert totals(bring(server, 0, 1, 2.0, op)) == {0: total, 1: total, 2: total}
    assert bring(server, 0, 1, 5.0, op) == [], "and none is made twice"
    assert not server.aggregation.expects(0, 1) and server.aggregation.expects(0, 2)


def test_an_overflow_reaches_all() -> None:
    for op in Op:
        server = serving(2, REDUCE_ONLY)
        bring(server, 0, 1, math.nan, op)
        assert all(math.isnan(value) for value in totals(bring(server, 1, 1, 1.0, op)).values())


def test_who_leaves_is_not_waited_for_who_comes_back_is_and_who_comes_late_has_no_part() -> None:
    server = serving(2, REDUCE_ONLY)
    assert bring(server, 0, 1, 4.0) == []
    assert totals(server.handle(Leave(worker=1))) == {0: 4.0}
    server.handle(Join(worker=1, clock=0))
    assert bring(server, 0, 2, 4.0) == []
    assert totals(bring(server, 1, 2, 2.0)) == {0: 3.0, 1: 3.0}
    server.handle(Join(worker=7))
    assert not server.aggregation.expects(7, 3)
    assert bring(server, 0, 3, 1.0) == [] and totals(bring(server, 1, 3, 3.0)) == {0: 2.0, 1: 2.0}


def test_bad_places_are_refused() -> None:
    for strategy in (SSDSGD, OSP):
        with pytest.raises(SettingError, match="on='ring': choose one of collectives, server"):
            strategy(on="ring")
        assert strategy().server_half() is None and strategy(on="server").server_half() is not None
