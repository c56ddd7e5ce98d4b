"""A server of groups: one group is SSP's server; many hold everything that was pushed, each push once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import GSSP, SSP
from offbeat.server.apply import make_apply
from offbeat.server.messages import Answer, Join, JoinAck, Leave, Pull, PullReply, Push
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.strategies.gssp.aggregation import PerGroup
from tests.support.group_servers import paced, push, reads, serving

# --- by hand


def test_a_group_tells_the_others_after_as_many_pushes_as_it_has_members() -> None:
    server = serving(GSSP(groups="0,1/2", staleness=3), 3)
    push(server, 0, 1, 1.0)
    assert reads(server, 0, 1) == 1.0, "its own are there at once"
    assert reads(server, 2, 0) == 0.0, "the others do not know yet"
    assert reads(server, 2, None) == 1.0, "but an evaluation sees everything"
    push(server, 2, 1, 100.0)
    assert reads(server, 2, 1) == 100.0, "a group of one tells at each push"
    assert reads(server, 0, 1) == 101.0
    push(server, 1, 1, 10.0)
    assert reads(server, 2, 1) == 111.0, "two pushes: both are told"
    assert reads(server, 1, 1) == reads(server, 0, None) == 111.0


def test_one_who_leaves_its_group_empty_leaves_nothing_untold() -> None:
    server = serving(GSSP(groups="0,1/2"), 3)
    push(server, 0, 1, 1.0)
    server.handle(Leave(worker=1))
    assert reads(server, 2, 0) == 0.0
    server.handle(Leave(worker=0))
    assert reads(server, 2, 0) == 1.0
    push(server, 2, 1, 5.0)
    assert server.handle(Join(worker=0, clock=1)) == [JoinAck(worker=0, clock=1)]
    assert reads(server, 0, 1) == 6.0, "and is told of what it missed"


def test_starting_again_replaces_the_weights_of_all_groups() -> None:
    server = serving(GSSP(groups="0/1"), 2)
    push(server, 0, 1, 1.0)
    server.restart([torch.full((3,), 7.0)])
    assert [reads(server, worker, 0) for worker in (0, 1)] == [7.0, 7.0]
    push(server, 1, 1, 1.0)
    assert [reads(server, 0, 0), reads(server, 1, 1)] == [8.0, 8.0]


def test_one_who_moves_finds_its_own_updates_in_its_new_group() -> None:
    """Worker 0 has pushed once more when the groups change places: its old group had not told that yet."""
    server = serving(GSSP(window=2, staleness=3), 4)
    clocks = dict.fromkeys(range(4), 0)
    paced(server, 2, {0: 1.0, 1: 1.0, 2: 4.0, 3: 4.0}, clocks)
    assert server.state.groups() == [[0, 1], [2, 3]]
    paced(server, 2, {0: 4.0, 1: 1.0, 2: 1.0}, clocks)
    paced(server, 1, {0: 4.0}, clocks)
    assert reads(server, 0, clocks[0]) == 15.0 and reads(server, 2, clocks[2]) == 14.0
    paced(server, 2, {3: 4.0}, clocks)
    assert server.state.groups() == [[1, 2], [0, 3]]
    assert [reads(server, worker, clocks[worker]) for worker in range(4)] == [17.0] * 4


# --- whatever comes

acts = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["step"] * 8 + ["push", "leave", "join", "look", "again"])),
    max_size=120,
)


class Crowd:
    """Workers that push 1 into an element of their own, and pull; some may have to wait."""

    def __init__(self, server: ParameterServer, staleness: int, overlap: bool) -> None:
        self.server = server
        self.staleness = staleness
        self.ahead = int(overlap)
        self.clocks: dict[int, int] = {}  # of those who are here
        self.pushes = [0] * 4
        self.owes: set[int] = set()  # has pushed, not asked
        self.waiting: set[int] = set()
        self.heard: list[Any] = []  # every answer, with the weights as they were

    def take(self, answers: list[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, PullReply):
                self.heard.append((answer, answer.weights[0].clone()))
                self.waiting.discard(answer.worker)
                assert 0 <= answer.staleness <= self.staleness
                own = answer.weights[0][answer.worker]
                assert own == self.pushes[answer.worker], "a read holds the reader's own"
            else:
                self.heard.append(answer)

    def act(self, worker: int, act: str, spent_s: float) -> None:
        if act == "join" and worker not in self.clocks:
            (welcome, *rest) = self.server.handle(Join(worker=worker))
            assert isinstance(welcome, JoinAck)
            self.clocks[worker] = welcome.clock
            self.take([welcome, *rest])
        elif worker not in self.clocks:
            return
        elif act == "leave":
            del self.clocks[worker]
            self.owes.discard(worker)
            self.waiting.discard(worker)
            self.take(self.server.handle(Leave(worker=worker)))
        elif act == "again" and worker not in self.owes | self.waiting:
            self.take(self.server.handle(Join(worker=worker, clock=self.clocks[worker])))
        elif act in ("step", "push") and worker not in self.owes | self.waiting:
            self.clocks[worker] += 1
            self.pushes[worker] += 1
            update = torch.zeros(4)
            update[worker] = 1
            clock = self.clocks[worker]
            self.take(self.server.handle(Push(worker=worker, clock=clock, update=[update], spent_s=spent_s)))
            self.owes.add(worker)
        if act == "step" and worker in self.owes:
            self.owes.remove(worker)
            self.waiting.add(worker)
            self.take(self.server.handle(Pull(worker=worker, clock=self.clocks[worker] + self.ahead)))


@settings(max_examples=150, deadline=None)
@given(
    acts,
    st.lists(st.sampled_from([1.0, 1.1, 2.0, 4.0]), min_size=4, max_size=4),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(["auto", "0,1/2,3", "0/1/2/3"]),
)
def test_everything_is_told_once_and_nobody_waits_for_ever(
    schedule: list[tuple[int, str]], spent_s: list[float], staleness: int, overlap: bool, groups: str
) -> None:
    """Speeds change half-way. Integers: sums are exact."""
    strategy = GSSP(staleness=staleness, groups=groups, window=2, overlap=overlap)
    server = serving(strategy, 0, torch.zeros(4))
    assert isinstance(server.aggregation, PerGroup)
    crowd = Crowd(server, staleness, strategy.overlaps)
    for worker in range(4):
        crowd.act(worker, "join", 1.0)
    for number, (worker, act) in enumerate(schedule):
        speed = spent_s[worker if number < len(schedule) / 2 else 3 - worker]
        crowd.act(worker, act, speed)
        everything = torch.tensor(crowd.pushes, dtype=torch.float32)
        assert torch.equal(server.weights[0], everything), "an evaluation sees all, exactly once"
        for one in crowd.clocks:
            held = server.aggregation.weights_for(server.state, one)[0]
            assert (held <= everything).all()
            kin = [w for w in crowd.clocks if server.state.group[w] == server.state.group[one]]
            assert all(held[w] == everything[w] for w in kin), "a group holds all of its members'"
            assert (everything - held).sum() < 4, "the other groups keep less than |G| pushes to themselves"
            slowest = min(server.state.progress(w) for w in kin)
            assert one not in crowd.waiting or server.state.progress(one) > slowest or strategy.overlaps
        if crowd.clocks:
            assert crowd.waiting != set(crowd.clocks), "somebody can go on"


@settings(max_examples=100, deadline=None)
@given(acts, st.integers(0, 2), st.booleans(), st.sampled_from(["auto", "0-3"]))
def test_one_group_is_ssp_bit_for_bit(
    schedule: list[tuple[int, str]], staleness: int, overlap: bool, groups: str
) -> None:
    ours = GSSP(staleness=staleness, groups=groups, window=2, overlap=overlap)
    theirs = SSP(staleness=staleness, overlap=overlap)
    crowds = [Crowd(serving(s, 0, torch.zeros(4)), staleness, s.overlaps) for s in (ours, theirs)]
    for worker, act in [*((w, "join") for w in range(4)), *schedule]:
        for crowd in crowds:
            crowd.act(worker, act, 1.0)
    assert len(crowds[0].heard) == len(crowds[1].heard)
    for one, other in zip(crowds[0].heard, crowds[1].heard, strict=True):
        if isinstance(one, tuple):
            assert replace(one[0], hint=0) == other[0] and torch.equal(one[1], other[1])
        else:
            assert one == other
    assert crowds[0].server.shard.applied == crowds[1].server.shard.applied


# --- an optimizer at the server


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_groups_whose_server_steps_tell_each_other_of_the_change(momentum: float) -> None:
    size = 3
    groups = [{"lr": 0.5, "momentum": momentum}]
    plan = OptimizerSpec(kinds=["SGD"], groups=groups, pieces=[(0, 0, 0, size, 0)], marks=1)
    servers = [
        ParameterServer(ShardState([torch.zeros(size)]), strategy.server_half(), make_apply(plan))
        for strategy in (GSSP(groups="0/1", push="gradient"), SSP(push="gradient"))
    ]
    for server in servers:
        for worker in (0, 1):
            server.handle(Join(worker=worker))
        for clock in (1, 2):
            for worker in (0, 1):
                update = [torch.full((size,), 1.0 + worker)]
                server.handle(Push(worker=worker, clock=clock, update=update, report=(0.5, 1.0)))
    ours, theirs = (server.weights[0] for server in servers)
    if momentum:  # each group's momentum is of its own gradients: −½(1 + 1.9), −½(2 + 3.8)
        torch.testing.assert_close(ours, torch.full_like(ours, -0.5 * 3 * 2.9))
    else:
        assert torch.equal(ours, theirs)
