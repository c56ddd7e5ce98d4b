"""GroupRule: SSP inside a group; groups by measured times, formed anew when the times have changed."""

from __future__ import annotations

import pytest

from offbeat import GSSP
from offbeat.server.messages import Join, JoinAck, Leave, Pull
from offbeat.strategies.gssp.rule import GroupRule
from tests.support.group_servers import paced, push, reads, serving
from tests.support.rules import of_clocks


def test_a_group_waits_for_its_own_slowest_only() -> None:
    server = serving(GSSP(groups="0,1/2", staleness=1), 3)
    for clock in (1, 2):
        for worker in (0, 1):
            push(server, worker, clock, 1.0)
        assert [reads(server, worker, clock) is not None for worker in (0, 1)] == [True, True]
    push(server, 0, 3, 1.0)
    assert reads(server, 0, 3) is not None
    push(server, 0, 4, 1.0)
    assert reads(server, 0, 4) is None, "two ahead of worker 1"
    push(server, 1, 3, 1.0)
    assert {answer.worker for answer in server.handle(Pull(worker=1, clock=3))} == {0, 1}
    assert server.state.of[2] == 0, "whose group they are not in"


def test_workers_are_grouped_once_their_times_are_known_and_again_when_they_change() -> None:
    server = serving(GSSP(window=4, staleness=2), 4)
    clocks = dict.fromkeys(range(4), 0)
    paced(server, 3, {0: 1.0, 1: 1.05, 2: 2.0, 3: 4.0}, clocks)
    assert server.state.groups() == [[0, 1, 2, 3]], "three times are not enough"
    paced(server, 1, {0: 1.0, 1: 1.05, 2: 2.0, 3: 4.0}, clocks)
    assert server.state.groups() == [[0, 1], [2], [3]]
    assert (
        len({server.aggregation.weights_for(server.state, worker)[0].data_ptr() for worker in range(4)}) == 3
    )
    assert all(server.aggregation.weights_for(server.state, worker)[0].eq(16).all() for worker in range(4))
    paced(server, 40, {0: 1.0, 1: 1.1, 2: 2.1, 3: 4.2}, clocks)
    assert server.state.regroupings == 1, "no flapping"
    paced(server, 4, {0: 1.0, 1: 4.0, 2: 2.0, 3: 4.0}, clocks)
    assert server.state.groups() == [[0], [2], [1, 3]]
    assert all(server.aggregation.weights_for(server.state, worker)[0].eq(192).all() for worker in range(4))
    for clock in range(clocks[1] + 1, clocks[1] + 3):
        push(server, 1, clock, 1.0)
        assert reads(server, 1, clock) is not None
    push(server, 1, clocks[1] + 3, 1.0)
    assert reads(server, 1, clocks[1] + 3) is None, "its new group's slowest is worker 3"
    push(server, 3, clocks[3] + 1, 1.0)
    assert {a.worker for a in server.handle(Pull(worker=3, clock=clocks[3] + 1))} == {1, 3}


def test_a_group_advances_although_somebody_joins_it_during_every_step() -> None:
    rule = GroupRule(staleness=1, fixed=(), max_ratio=2.0, window=1000)
    state = rule.init()
    for worker in (0, 1):
        rule.join(state, worker, None)
    for step in range(1, 20):
        for worker in (0, 1):
            state.set(worker, step)
        assert rule.join(state, 100 + step, None) == step
        rule.leave(state, 99 + step)  # the one before goes before its first push
        assert state.slowest_of(0) == step


def test_a_newcomer_sits_with_the_slowest_and_starts_where_they_are() -> None:
    server = serving(GSSP(window=2, staleness=1), 2)
    clocks = {0: 0, 1: 0}
    paced(server, 2, {0: 1.0, 1: 9.0}, clocks)
    for clock in range(3, 50):
        push(server, 0, clock, 1.0)
        assert reads(server, 0, clock) is not None, "it is alone in its group"
    push(server, 1, 3, 1.0, 9.0)
    assert reads(server, 1, 3) is not None
    (welcome,) = server.handle(Join(worker=7))
    assert isinstance(welcome, JoinAck)
    assert (server.state.group[7], server.state.progress(7), server.state.progress(1)) == (1, 1, 1)
    push(server, 7, welcome.clock + 1, 1.0)
    assert reads(server, 7, welcome.clock + 1) is not None


def test_one_who_comes_back_after_a_regrouping_holds_nobody_up() -> None:
    server = serving(GSSP(window=2, staleness=1), 3)
    clocks = {0: 0, 1: 0, 2: 0}
    paced(server, 1, {0: 1.0, 1: 1.0, 2: 9.0}, clocks)
    server.handle(Leave(worker=1))
    paced(server, 9, {0: 1.0, 2: 9.0}, clocks)
    assert server.state.groups() == [[0], [2]]
    assert reads(server, 1, None) == 21.0, "it may look meanwhile"
    assert server.handle(Join(worker=1, clock=1)) == [JoinAck(worker=1, clock=1)]
    assert server.state.groups() == [[0], [1, 2]]
    assert server.state.progress(1) == server.state.progress(2)


def test_one_with_steps_left_does_not_wait_for_those_who_have_done_all() -> None:
    """They are at 9 of 9, and wait for it; since the regrouping it has done more steps than they."""
    rule = GroupRule(staleness=1, fixed=((0, 1),), max_ratio=1.25, window=8)
    state = rule.init()
    for worker, clock in ((0, 4), (1, 8)):
        rule.join(state, worker, clock)
    state.regroup([[0, 1]])
    state.set(1, 9)
    for clock in (7, 8, 9, 10):
        state.set(0, clock)
        assert rule.admits(state, 0, clock)
        assert rule.staleness_of(state, 0, clock) == max(0, clock - 9)
    state.set(0, 11)
    assert not rule.admits(state, 0, 11), "ahead by both counts"
    newcomer = rule.join(state, 2, None)
    assert (newcomer, state.progress(2)) == (9, 1), "beside the one that has done least since"


@pytest.mark.parametrize(
    ("fixed", "hints"),
    [(((0, 1, 2, 3),), [1, 1, 1, 1]), (((0,), (1, 2), (3,)), [0, 1, 1, 2]), (((0, 1), (2, 3)), [0, 0, 2, 2])],
    ids=str,
)
def test_the_hint_is_the_speed_of_the_group(fixed: tuple[tuple[int, ...], ...], hints: list[int]) -> None:
    rule = GroupRule(staleness=1, fixed=fixed, max_ratio=1.25, window=8)
    state = of_clocks(rule, 0, 0, 0, 0)
    assert [rule.hint(state, worker) for worker in range(4)] == hints
