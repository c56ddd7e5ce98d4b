"""A copy of a shard that follows its journal: whenever the shard dies, the copy has what was acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import ASP, GSSP, OSP, SSDSGD, SSP, Oscars
from offbeat.server.apply import MakeApply, make_apply
from offbeat.server.follower import Follower
from offbeat.server.half import ServerHalf
from offbeat.server.journal import Effect, EffectKind
from offbeat.server.messages import Join, JoinAck, Leave, Load, Pull, Push, PushAck, Tick
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState

WORKERS = 3
HALVES: dict[str, Any] = {
    "asp": ASP(),
    "ssp": SSP(staleness=1),
    "gssp": GSSP(),
    "oscars": Oscars(),
    "oscars-normalised": Oscars(normalise=True, weighted=False),
    "ssd_sgd": SSDSGD(on="server"),
}


def spec() -> OptimizerSpec:
    """SGD with momentum for four elements, of which a push may leave the last two out."""
    group = {"lr": 0.5, "momentum": 0.5}
    return OptimizerSpec(kinds=["SGD"], groups=[group], pieces=[(0, 0, 0, 2, 0), (0, 0, 2, 4, 1)], marks=2)


class Copied:
    """A shard, and a copy that follows it from some moment on."""

    def __init__(self, half: ServerHalf, make: MakeApply, parts: int) -> None:
        self.server = ParameterServer(ShardState([torch.zeros(4)]), half, make)
        self.make, self.parts = make, parts
        self.follower: Follower | None = None
        self.acknowledged: dict[int, int] = {}  # by worker, the clock
        self.joined: dict[int, int] = {}  # and that of its latest push, or at which it joined
        self.server.aggregation.journal = self.record

    def record(self, effect: Effect) -> None:
        if self.follower is not None:
            self.follower.follow(effect)

    def begin(self) -> None:
        """The state is sent whole, and what is not in it."""
        copy = ShardState([])
        self.server.copy_into(copy, self.parts)
        self.follower = Follower(copy, self.make)
        for effect in self.server.unapplied():
            self.follower.follow(effect)

    def handle(self, message: Any) -> None:
        for answer in self.server.handle(message):
            if isinstance(answer, PushAck):
                self.acknowledged[answer.worker] = max(answer.clock, self.acknowledged[answer.worker])
            if isinstance(answer, JoinAck):
                self.joined[answer.worker] = self.acknowledged[answer.worker] = answer.clock


def reports(name: str, random: Random) -> tuple[float, ...]:
    if name.startswith("oscars"):  # samples, steps, seconds a step and an exchange, losses
        return (random.randint(1, 3), random.randint(1, 3), random.choice([0.0, 1.0]), 0.0, 1.0, 1.0)
    return (0.5, 1.0, random.choice([0.0, 1.0])) if name == "ssd_sgd" else ()


def conversation(name: str, random: Random, copied: Copied) -> Iterator[Any]:
    """What workers send that come, go and return; each waits for the acknowledgement of its push."""
    clocks, acknowledged = copied.joined, copied.acknowledged
    yield Load(worker=-1, part=0, tensors=[torch.ones(4)])
    for at_s in range(random.randint(5, 60)):
        worker = random.randrange(WORKERS)
        if worker not in clocks:
            yield Join(worker=worker)
        elif random.random() < 0.1:
            yield Leave(worker=worker, at_s=at_s)
            clock = acknowledged.get(worker, clocks[worker])
            yield Join(worker=worker, clock=clock, fenced=random.random() < 0.3)
        elif random.random() < 0.1:
            yield Tick(at_s=at_s)
        elif acknowledged[worker] == clocks[worker]:
            clocks[worker] += 1
            value = random.choice([1.0, 2.0, -3.0, float("nan")])
            update = [torch.full((4,), value)]
            report = reports(name, random)
            yield Push(worker=worker, clock=clocks[worker], update=update, report=report, at_s=at_s)
            yield Pull(worker=worker, clock=clocks[worker])


@pytest.mark.parametrize("name", HALVES)
@given(seed=st.integers(0, 2**32), begins=st.integers(0, 100))
@settings(max_examples=60)
def test_a_copy_has_all_that_was_acknowledged(name: str, seed: int, begins: int) -> None:
    """It begins with the whole state at any moment, and follows; then it equals the shard, bit for bit."""
    half = HALVES[name].server_half()
    make = make_apply(spec() if name == "ssd_sgd" else None)
    copied = Copied(half, make, len(spec().state_names()) if name == "ssd_sgd" else 0)
    for place, message in enumerate(conversation(name, Random(seed), copied)):
        copied.handle(message)
        if place == begins or (place == 0 and begins > 60):
            copied.begin()
    if copied.follower is None:
        copied.begin()
    expected = ShardState([])
    copied.server.copy_into(expected, copied.parts)
    server, follower = copied.server, copied.follower
    assert follower is not None
    if server.aggregation.acks_at_once:  # pushes that were only gathered are acknowledged, too
        for effect in server.unapplied():
            factor = effect.factor
            torch._foreach_add_(expected.weights, effect.update, alpha=factor)
            expected.applied.update(effect.clocks)
    got = follower.settle()
    assert got.applied == expected.applied
    assert all(got.applied[worker] >= clock for worker, clock in copied.acknowledged.items())
    for ours, theirs in zip(flat(got), flat(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def flat(state: ShardState) -> list[torch.Tensor]:
    return [*state.weights, *(tensor for part in state.optimizer for tensor in part)]


def test_a_round_in_progress_is_in_the_state_that_is_given_back() -> None:
    follower = Follower(ShardState([torch.zeros(2)]), make_apply(None))
    for worker, value in enumerate((1.0, 4.0)):
        update = [torch.full((2,), value)]
        kind = EffectKind.GATHER
        follower.follow(Effect(kind=kind, clocks={worker: 7}, update=update, weight=1.0 + worker, factor=2.0))
    state = follower.settle()
    assert state.applied == {0: 7, 1: 7}
    assert state.weights[0].tolist() == [6.0, 6.0], "2 · (1·1 + 2·4)/3"


def test_what_cannot_be_followed_says_so() -> None:
    osp, grouped = OSP(on="server").server_half(), GSSP(push="gradient").server_half()
    assert osp is not None and grouped is not None
    state = ShardState([torch.zeros(4)])
    assert not ParameterServer(state, osp).aggregation.can_be_followed
    assert not ParameterServer(state, grouped, make_apply(spec())).aggregation.can_be_followed
    assert ParameterServer(state, grouped).aggregation.can_be_followed
