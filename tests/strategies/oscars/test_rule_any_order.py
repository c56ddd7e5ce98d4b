"""Oscars' server, whatever comes in whatever order: against a model of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.server.messages import Join, JoinAck, Leave, Pull, PullReply, Push, Tick
from tests.support.oscars_stage import Stage

acts = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["step"] * 8 + ["gone", "tick", "look", "broken"]),
    st.floats(0, 6),
)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0]), min_size=4, max_size=4),
    st.lists(acts, max_size=80),
)
def test_nobody_is_stuck_and_every_update_counts_as_it_should(
    lateness: int, weighted: bool, step_s: list[float], schedule: list[tuple[int, str, float]]
) -> None:
    """Against a model of it that keeps every update of a round, and sums them up at its end."""
    stage = Stage(0, lateness=lateness, weighted=weighted)
    server, state = stage.server, stage.server.state
    waiting: set[int] = set()
    holds: dict[int, int] = {}  # the round whose weights each has read
    gathered: list[tuple[float, float]] = []
    expected, number, now_s = 0.0, 0, 0.0

    def handle(message: Any) -> None:
        nonlocal expected, number
        answers = server.handle(message)
        if state.number != number:
            total = sum(weight for weight, _ in gathered)
            expected += sum(weight / total * update for weight, update in gathered)
            gathered.clear()
            number = state.number
        for answer in answers:
            if isinstance(answer, JoinAck):
                stage.clocks[answer.worker] = answer.clock
            elif isinstance(answer, PullReply) and answer.worker in waiting:
                waiting.remove(answer.worker)
                holds[answer.worker] = number
                assert answer.staleness <= lateness and answer.hint >= 1

    for turn, (worker, act, later_s) in enumerate(schedule):
        now_s += later_s
        if worker not in state.clocks.of:
            holds[worker] = number
            handle(Join(worker=worker))
        elif act == "tick":
            handle(Tick(at_s=now_s))
        elif act == "gone":
            waiting.discard(worker)
            handle(Leave(worker=worker, at_s=now_s))
        elif act == "look":
            if worker not in waiting:
                assert any(isinstance(a, PullReply) for a in server.handle(Pull(worker=worker, clock=None)))
        elif act == "broken":
            handle(Leave(worker=worker, at_s=now_s))
            handle(Join(worker=worker, clock=stage.clocks[worker]))
            if worker in waiting:
                handle(Pull(worker=worker, clock=stage.clocks[worker]))
        elif worker not in waiting:
            age = number - holds[worker]
            samples = float(1 + turn % 5)
            if age <= lateness:
                gathered.append(((samples if weighted else 1.0) / (1 + age), float(turn)))
            stage.clocks[worker] += 1
            figures = (samples, 1.0, step_s[worker], 0.0, 0.0, 0.0)
            told = [torch.tensor([float(turn)])]
            clock = stage.clocks[worker]
            handle(Push(worker=worker, clock=clock, update=told, report=figures, at_s=now_s, spent_s=later_s))
            waiting.add(worker)
            handle(Pull(worker=worker, clock=clock))
        assert stage.weight == pytest.approx(expected, rel=1e-4, abs=1e-4)
        missing = state.awaited - state.pulling
        assert not waiting or missing, "somebody is waited for, who is here"
        assert missing <= set(state.clocks.of)
    if server.aggregation.wake_at(state) is not None:
        for _ in range(2):  # the deadline, and the end of a round from which all are missing but the late
            if waiting:
                wake_at = server.aggregation.wake_at(state)
                assert wake_at is not None and wake_at <= now_s + 2.2 * state.plan.length_s
                handle(Tick(at_s=wake_at))
        assert not waiting, "and not for ever"
