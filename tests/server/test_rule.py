"""What servers decide: SSP's bound, DSSP's credit and its controller, ASP's indifference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import ASP, DSSP, SSP, SettingError
from offbeat.core.strategy import Strategy
from offbeat.server.messages import Join, JoinAck, Leave, Pull, PullReply, Push, PushAck
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.strategies.dssp import DynamicStaleness


def pushed(rule: Any, state: Any, worker: int, clock: int, at_s: float = 0.0) -> bool:
    """A worker pushes; whether it may go on at once."""
    rule.advance(state, Push(worker=worker, clock=clock, update=[], at_s=at_s))
    return bool(rule.admits(state, worker, clock))


def of_clocks(rule: Any, *clocks: int) -> Any:
    state = rule.init()
    for worker, clock in enumerate(clocks):
        assert rule.join(state, worker, clock) == clock
    assert rule.members(state) == list(range(len(clocks)))
    return state


# --- SSP, ASP


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_goes_on_up_to_its_bound_and_no_further(staleness: int) -> None:
    rule = SSP(staleness=staleness).rule()
    state = of_clocks(rule, 0, 0)
    for clock in range(1, staleness + 1):
        assert pushed(rule, state, 0, clock)
        assert rule.staleness_of(state, 0, clock) == clock
    assert not pushed(rule, state, 0, staleness + 1)
    assert pushed(rule, state, 1, 1)
    assert rule.admits(state, 0, staleness + 1)
    assert rule.staleness_of(state, 0, staleness + 1) == staleness


def test_asp_waits_for_nobody() -> None:
    rule = ASP().rule()
    state = of_clocks(rule, 0, 0)
    assert all(pushed(rule, state, 0, clock) for clock in range(1, 100))
    assert rule.staleness_of(state, 0, 99) == 99


# --- DSSP, step by step


def paced(
    low: int, high: int, mine: tuple[float, float], theirs: tuple[float, float]
) -> tuple[DynamicStaleness, Any]:
    """Worker 0 is `low` ahead of worker 1; these are the times of their two latest pushes."""
    rule = DSSP(low=low, high=high, overlap=False).rule()
    state = of_clocks(rule, 10 + low, 10)
    state.times = {0: mine, 1: theirs}
    return rule, state


def test_dssp_within_low_is_ssp() -> None:
    rule = DSSP(low=2, high=2, overlap=False).rule()
    state = of_clocks(rule, 0, 0)
    assert [pushed(rule, state, 0, clock, clock) for clock in (1, 2, 3)] == [True, True, False]
    assert pushed(rule, state, 1, 1)
    assert rule.admits(state, 0, 3)


def test_the_controller_predicts_where_pushes_meet() -> None:
    """The fast one pushes every second and is at 10 s; the slow one every 4 s, last at 9.5 s: next at 13.5,
    17.5 and so on. After r more steps the fast one is at 10 + r: 3.5 s from it, 2.5, 1.5, 0.5 at r = 3, and
    0.5 again at r = 4: the lesser counts. 11 to 17 are all within what `high` allows.
    """
    rule, state = paced(3, 15, (8.0, 9.0), (5.5, 9.5))
    assert pushed(rule, state, 0, 14, 10.0), "it is granted 3, and this push spends the first"
    assert state.credit[0] == 2
    assert pushed(rule, state, 0, 15, 11.0)
    assert pushed(rule, state, 0, 16, 12.0)
    assert state.credit[0] == 0
    assert not pushed(rule, state, 0, 17, 13.0), "the slow one is due in half a second: no step is nearer"


def test_no_credit_where_waiting_now_is_best() -> None:
    """Now, at 10 s, the slow one is due at 10.1 s; every 3 s against every 5.1 s is never so near again."""
    rule, state = paced(3, 15, (4.0, 7.0), (-0.1, 5.0))
    assert not pushed(rule, state, 0, 14, 10.0)
    assert state.credit[0] == 0
    assert rule.grant(state, 0) == 0


def test_a_later_push_of_the_slowest_may_be_the_nearest() -> None:
    """Both at 12 s, every 3 s against every 4 s: 15, 18, 21, 24 and 16, 20, 24 meet after four steps."""
    rule, state = paced(2, 9, (6.0, 9.0), (8.0, 12.0))
    assert pushed(rule, state, 0, 13, 12.0)
    assert state.credit[0] == 3, "four granted, one spent"


def test_credit_never_reaches_beyond_high() -> None:
    rule, state = paced(1, 4, (8.0, 9.0), (0.0, 9.0))  # the slow one is predicted at 18 s, 8 steps away
    gaps = []
    clock = 12
    while pushed(rule, state, 0, clock, clock - 2.0):
        gaps.append(rule.staleness_of(state, 0, clock))
        clock += 1
    assert gaps == [2, 3, 4]
    assert pushed(rule, state, 1, 11, 18.0) and not rule.admits(state, 0, 15)
    for late in range(12, 15):
        assert pushed(rule, state, 1, late, 18.0)
    assert rule.admits(state, 0, 15), "it has waited until the gap was `low`"


def test_only_the_fastest_is_given_credit() -> None:
    rule = DSSP(low=1, high=10, overlap=False).rule()
    state = of_clocks(rule, 6, 5, 2)
    state.times = {0: (5.0, 6.0), 1: (5.0, 6.0), 2: (0.0, 6.0)}
    assert not pushed(rule, state, 1, 5, 7.0)
    assert pushed(rule, state, 0, 7, 7.0)


def test_without_two_pushes_of_the_slowest_there_is_nothing_to_predict() -> None:
    rule = DSSP(low=0, high=5).rule()
    state = of_clocks(rule, 0, 0)
    assert not pushed(rule, state, 0, 1, 1.0)


def test_who_leaves_takes_its_credit_along() -> None:
    rule, state = paced(1, 10, (8.0, 9.0), (0.0, 9.0))
    assert pushed(rule, state, 0, 12, 10.0) and state.credit[0]
    rule.leave(state, 0)
    assert rule.join(state, 0, None) == 10
    assert rule.members(state) == [1, 0]
    assert not state.credit.get(0) and 0 not in state.free and 0 not in state.times


# --- DSSP, where weights are asked for before they are used


@pytest.mark.parametrize(
    ("strategy", "overlaps"),
    [
        (ASP(), True),
        (ASP(overlap=False), False),
        (SSP(staleness=0), False),
        (SSP(staleness=1), True),
        (SSP(staleness=1, overlap=False), False),
        (DSSP(low=0, high=4), False),
        (DSSP(low=1, high=1), True),
        (DSSP(low=1, high=4, overlap=False), False),
    ],
    ids=str,
)
def test_pulls_overlap_where_the_bound_leaves_room(strategy: Any, overlaps: bool) -> None:
    assert strategy.overlaps is overlaps


def test_the_controller_counts_from_where_weights_will_be_used() -> None:
    """As above, one step later: at clock 13 it asks for what it will use at 14, four ahead of the slowest."""
    rule = DSSP(low=3, high=15).rule()
    assert rule.ahead == 1
    state = of_clocks(rule, 12, 10)
    state.times = {0: (8.0, 9.0), 1: (5.5, 9.5)}
    rule.advance(state, Push(worker=0, clock=13, update=[], at_s=10.0))
    assert state.credit[0] == 2, "three granted, one spent"
    assert rule.admits(state, 0, 14) and rule.staleness_of(state, 0, 14) == 4


def test_credit_reaches_no_further_where_weights_are_used_later() -> None:
    rule = DSSP(low=1, high=4).rule()
    state = of_clocks(rule, 10, 10)
    state.times = {0: (7.0, 8.0), 1: (0.0, 8.0)}
    gaps, clock = [], 11
    while True:
        rule.advance(state, Push(worker=0, clock=clock, update=[], at_s=clock - 2.0))
        if not rule.admits(state, 0, clock + 1):
            break
        gaps.append(rule.staleness_of(state, 0, clock + 1))
        clock += 1
    assert gaps == [2, 3, 4]


# --- whatever comes, in whatever order

RULED: list[tuple[Strategy[Any], int | None]] = [
    (ASP(), None),
    (SSP(staleness=0), 0),
    (SSP(staleness=2), 2),
    (SSP(staleness=2, overlap=False), 2),
    (DSSP(low=0, high=3), 3),
    (DSSP(low=2, high=2), 2),
    (DSSP(low=1, high=6), 6),
    (DSSP(low=1, high=6, overlap=False), 6),
    (DSSP(low=3, high=4), 4),
]
events = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["step"] * 6 + ["gone", "look"])), max_size=80)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(RULED), events, st.lists(st.floats(0, 9), min_size=1, max_size=5))
def test_no_read_is_staler_than_the_bound_and_nobody_is_stuck(
    ruled: tuple[Strategy[Any], int | None], schedule: list[tuple[int, str]], waits_s: list[float]
) -> None:
    strategy, bound = ruled
    server = ParameterServer(ShardState([torch.zeros(1)]), strategy.server_half())  # type: ignore[arg-type, var-annotated]
    ahead = int(strategy.overlaps)  # type: ignore[attr-defined]
    clocks: dict[int, int] = {}
    waiting: set[int] = set()
    now_s = 0.0

    def handle(message: Any) -> None:
        answers = server.handle(message)
        if isinstance(message, Join | Push):
            first, *answers = answers
            assert first == (
                JoinAck(worker=message.worker, clock=clocks[message.worker])
                if isinstance(message, Join)
                else PushAck(worker=message.worker, clock=message.clock)
            )
        for reply in answers:
            assert isinstance(reply, PullReply)
            waiting.remove(reply.worker)
            if clock_of.get(reply.worker) is not None:
                assert reply.staleness == clocks[reply.worker] + ahead - min(clocks.values())
                assert bound is None or reply.staleness <= bound

    clock_of: dict[int, int | None] = {}
    for turn, (worker, what) in enumerate(schedule):
        now_s += waits_s[turn % len(waits_s)]
        if worker not in clocks:
            clocks[worker] = min(clocks.values(), default=0)
            handle(Join(worker=worker))
        elif what == "gone":
            del clocks[worker]
            waiting.discard(worker)
            handle(Leave(worker=worker))
        elif worker in waiting:
            continue
        elif what == "look":
            waiting.add(worker)
            clock_of[worker] = None
            handle(Pull(worker=worker, clock=None))
            assert worker not in waiting
        else:
            clock = clocks[worker] + 1
            handle(Push(worker=worker, clock=clock, update=[torch.ones(1)], at_s=now_s))
            clocks[worker] = clock
            clock_of[worker] = clock
            waiting.add(worker)
            handle(Pull(worker=worker, clock=clock + ahead))
        slowest = min(clocks.values(), default=0)
        assert not any(clocks[stuck] == slowest for stuck in waiting), "the slowest always goes on"
        assert bound is not None or not waiting


# --- settings


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SSP(staleness=-1), "staleness=-1"),
        (lambda: SSP(staleness=1.5), "staleness=1.5"),  # type: ignore[arg-type]
        (lambda: SSP(staleness="3"), "staleness='3'"),  # type: ignore[arg-type]
        (lambda: DSSP(low=4, high=3), "low=4, high=3"),
        (lambda: DSSP(low=-1), "low=-1"),
        (lambda: DSSP(high=2.5), "high=2.5"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        make()
