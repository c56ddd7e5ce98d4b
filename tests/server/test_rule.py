"""Rules of a server: clocks of members, and no read beyond a rule's bound, whatever comes in which order."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import ASP, DSSP, GSSP, SSP, Oscars
from offbeat.core.strategy import Strategy
from offbeat.server.messages import Join, JoinAck, Leave, Pull, PullReply, Push, PushAck, Tick
from offbeat.server.rule import Clocks, LockStep, Unbounded
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from tests.support.rules import of_clocks, pushed

# --- DSSP, step by step


# --- by clocks alone


def test_a_new_worker_starts_where_the_slowest_is_and_a_returning_one_where_it_was() -> None:
    clocks = Clocks()
    assert clocks.slowest == clocks.join(0, None) == 0
    clocks.of[0] = 7
    assert clocks.join(1, 5) == 5
    assert clocks.join(2, None) == clocks.slowest == 5


def test_the_slowest_clock_advances_although_somebody_joins_during_every_step() -> None:
    clocks = Clocks()
    for worker in (0, 1):
        clocks.join(worker, None)
    for step in range(1, 20):
        clocks.of[0] = clocks.of[1] = step
        assert clocks.join(100 + step, None) == step, "where the slowest of those is who have pushed"
        clocks.of.pop(99 + step, None)  # the one before goes before its first push
        assert clocks.slowest == step


def test_whoever_returns_with_its_clock_is_not_new() -> None:
    clocks = Clocks()
    clocks.join(0, None)
    clocks.of[0] = 4
    assert clocks.join(1, None) == 4
    del clocks.of[1]
    clocks.join(1, 4)
    clocks.of[0] = 6
    assert clocks.join(2, None) == 4


def test_whoever_leaves_is_no_member_and_not_the_slowest() -> None:
    rule = Unbounded()
    state = of_clocks(rule, 3, 9)
    rule.leave(state, 0)
    rule.leave(state, 0)
    assert rule.members(state) == [1]
    assert rule.staleness_of(state, 1, 9) == 0


def test_staleness_is_counted_from_the_slowest_and_an_evaluation_has_none() -> None:
    rule = Unbounded()
    state = of_clocks(rule, 3, 9)
    assert pushed(rule, state, 1, 10)
    assert [rule.staleness_of(state, 1, clock) for clock in (10, 2, None)] == [7, 0, 0]
    assert rule.hint(state, 1) == 0


def test_in_lock_step_a_worker_waits_until_its_own_push_counts() -> None:
    rule = LockStep()
    state = of_clocks(rule, 4, 4)
    assert rule.admits(state, 0, 4) and not rule.admits(state, 0, 5)
    assert pushed(rule, state, 0, 5)
    assert rule.admits(state, 2, 1), "no member: it may look"


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "pop", "join", "clear"]), st.integers(0, 5), st.integers(-2, 6)),
        max_size=60,
    )
)
def test_the_slowest_clock_is_kept_as_clocks_change(changes: list[tuple[str, int, int]]) -> None:
    clocks, plain = Clocks(), dict[int, int]()
    started = dict[int, int]()  # those who are new, and their clocks
    for change, worker, clock in changes:
        if change == "set":
            clocks.of[worker] = plain[worker] = clock
        elif change == "pop":
            assert clocks.of.pop(worker, None) == plain.pop(worker, None)
        elif change == "join":
            known = [clock for other, clock in plain.items() if other not in started]
            plain[worker] = started[worker] = min(known or plain.values(), default=0)
            assert clocks.join(worker, None) == plain[worker]
        elif not worker:
            clocks.of.clear()
            plain.clear()
        started = {new: at for new, at in started.items() if plain.get(new) == at}
        assert clocks.of.new == set(started)
        assert clocks.slowest == min(plain.values(), default=0)
        assert clocks.of.greatest == max(plain.values(), default=0)
        assert clocks.of == plain and list(clocks.of) == list(plain)


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
        if isinstance(message, Join):
            first, *answers = answers
            assert isinstance(first, JoinAck) and first.worker == message.worker
            assert min(clocks.values(), default=0) <= first.clock <= max(clocks.values(), default=0)
            clocks[message.worker] = first.clock
        elif isinstance(message, Push):
            first, *answers = answers
            assert first == PushAck(worker=message.worker, clock=message.clock)
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


GATED: list[Strategy[Any]] = [
    SSP(staleness=0),
    SSP(staleness=1),
    DSSP(low=1, high=3),
    GSSP(staleness=1, window=2),
    GSSP(staleness=0, groups="0,1/2,3"),
    Oscars(lateness=1),
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(GATED),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["step"] * 6 + ["gone", "look", "tick"])), max_size=60
    ),
    st.lists(st.sampled_from([0.1, 0.5, 3.0]), min_size=4, max_size=4),
)
def test_who_still_waits_behind_an_unchanged_gate_would_not_be_admitted(
    strategy: Strategy[Any], schedule: list[tuple[int, str]], step_s: list[float]
) -> None:
    """Against a server that looks at all who wait after every message."""
    half, patient = strategy.server_half(), strategy.server_half()
    assert half is not None and patient is not None
    object.__setattr__(patient.rule, "gate", lambda state: None)
    servers = [ParameterServer(ShardState([torch.zeros(1)]), each) for each in (half, patient)]
    clocks: dict[int, int] = {}
    waiting: set[int] = set()
    now_s = 0.0

    def handle(message: Any) -> None:
        answers, expected = (server.handle(message) for server in servers)
        assert answers == expected
        waiting.difference_update(reply.worker for reply in answers if isinstance(reply, PullReply))
        clocks.update((ack.worker, ack.clock) for ack in answers if isinstance(ack, JoinAck))

    for worker, what in schedule:
        now_s += step_s[worker]
        if worker not in clocks:
            handle(Join(worker=worker))
        elif what == "gone":
            del clocks[worker]
            waiting.discard(worker)
            handle(Leave(worker=worker, at_s=now_s))
        elif what == "tick":
            handle(Tick(at_s=now_s))
        elif worker not in waiting:
            clock = None
            if what == "step":
                clock = clocks[worker] = clocks[worker] + 1
                report = (1.0, 1.0, step_s[worker], 0.0, 0.0, 0.0)
                told = [torch.ones(1)]
                handle(
                    Push(
                        worker=worker,
                        clock=clock,
                        update=told,
                        report=report,
                        at_s=now_s,
                        spent_s=step_s[worker],
                    )
                )
            waiting.add(worker)
            handle(Pull(worker=worker, clock=clock))
