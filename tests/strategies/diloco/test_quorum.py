"""DiLoCo on a server: with all workers it is DiLoCo, with a quorum nobody waits for all; nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import DiLoCo, SettingError
from offbeat.core.ledger import Ledger
from offbeat.server.apply import make_apply
from offbeat.server.messages import Join, Leave, Pull, PullReply, Push, Tick
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.worlds.virtual.session import VirtualSession
from offbeat.worlds.virtual.simulation import run_workers
from tests.support.diloco_bowls import Bowls
from tests.support.virtual_runs import cluster_of, play

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("world", [1, 3])
def test_with_all_workers_and_equal_samples_it_is_diloco(world: int, momentum: float) -> None:
    trained = []
    for on in ("collectives", "server"):
        task = Bowls()
        strategy = DiLoCo(period=4, outer_momentum=momentum, on=on)
        run = play(cluster_of(*[1.0] * world), strategy, 20, task=task, evaluate_every=20)
        trained.append(torch.stack([*run.weights, task.published[-1]]))
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("samples", "expected"), [((1, 3), 7.0), ((2, 2), 6.0)], ids=str)
def test_a_worker_counts_by_its_samples(samples: tuple[int, int], expected: float) -> None:
    """Two steps of −2 and of −4, from 0 to 4 and to 8: by samples the mean is (1·4 + 3·8)/4, or 6."""

    def push_away(model: nn.Module, rank: int) -> Tensor:
        model.get_parameter("w").grad = torch.full((1,), -2.0 * (1 + rank))
        return torch.zeros(())

    def build(rank: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(torch.zeros(1)))
        return model, [torch.optim.SGD(model.parameters(), lr=1.0)]

    async def train(session: VirtualSession) -> float:
        for _ in range(2):
            await session.backward(session.rank, samples=samples[session.rank])
            await session.update()
        return session.model.get_parameter("w").item()

    strategy = DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, on="server")
    ends = run_workers(2, cluster_of(0.1, 0.1), strategy, build, push_away, train)
    assert ends == [expected, expected]


@dataclass
class Stage:
    """A server of one weight, which starts at 0, with η = 1 and no momentum unless told otherwise."""

    server: ParameterServer

    @classmethod
    def of(cls, workers: int, **settings: Any) -> Stage:
        strategy = DiLoCo(**{"outer_lr": 1.0, "outer_momentum": 0.0, "on": "server", **settings})
        half = strategy.server_half()
        assert half is not None and half.outer_sgd is not None
        spec = OptimizerSpec(kinds=["SGD"], groups=[dict(half.outer_sgd)], pieces=[(0, 0, 0, 1, 0)], marks=1)
        stage = cls(ParameterServer(ShardState([torch.zeros(1)]), half, make_apply(spec)))
        for worker in range(workers):
            stage.server.handle(Join(worker=worker))
        return stage

    def push(self, worker: int, clock: int, change: float, samples: float, at_s: float = 0.0) -> list[int]:
        """Push, and pull; return who is answered."""
        lr = self.server.rule.outer_lr
        update = [torch.tensor([-change])]
        push = Push(worker=worker, clock=clock, update=update, report=(lr, 1.0, samples), at_s=at_s)
        self.server.handle(push)
        return self.told(Pull(worker=worker, clock=clock))

    def told(self, message: Any) -> list[int]:
        answers = self.server.handle(message)
        return [answer.worker for answer in answers if isinstance(answer, PullReply)]

    @property
    def w(self) -> float:
        return self.server.weights[0].item()


def test_a_quorum_ends_a_round_weighted_by_samples_and_a_late_push_counts_in_the_next() -> None:
    stage = Stage.of(3, quorum=2)
    assert stage.push(0, 1, 4.0, samples=1) == [] and stage.w == 0
    assert stage.push(1, 1, 8.0, samples=3) == [0, 1]
    assert stage.w == 7.0, "(1·4 + 3·8)/4"
    assert stage.push(2, 1, 100.0, samples=1) == [2], "late: it goes on at once, from the weights as they are"
    assert stage.w == 7.0 and stage.server.state.lateness[2] == 1
    assert stage.push(0, 2, 10.0, samples=1) == [], "a late push is not one of the quorum"
    assert stage.push(2, 2, 10.0, samples=2) == [0, 2]
    assert stage.w == 7.0 + (100 + 10 + 20) / 4
    assert stage.server.state.lateness[2] == 0


def test_a_round_ends_some_seconds_after_its_first_push() -> None:
    stage = Stage.of(3, grace_s=5.0)
    wake_at = stage.server.aggregation.wake_at
    assert wake_at(stage.server.state) is None
    stage.push(0, 1, 6.0, samples=1, at_s=10.0)
    stage.push(1, 1, 2.0, samples=1, at_s=12.0)
    assert wake_at(stage.server.state) == 15.0
    assert stage.told(Tick(at_s=14.9)) == [] and stage.w == 0
    assert stage.told(Tick(at_s=15.0)) == [0, 1] and stage.w == 4.0
    assert wake_at(stage.server.state) is None
    assert stage.push(2, 1, 3.0, samples=1, at_s=16.0) == [2] and stage.w == 4.0
    assert wake_at(stage.server.state) is None, "a late push alone sets no deadline"
    assert stage.push(0, 2, 1.0, samples=1, at_s=20.0) == []
    assert stage.told(Tick(at_s=25.0)) == [0] and stage.w == 6.0


def test_who_leaves_is_not_waited_for() -> None:
    stage = Stage.of(3)
    stage.push(0, 1, 6.0, samples=1)
    stage.push(1, 1, 2.0, samples=1)
    assert stage.told(Leave(worker=2)) == [0, 1] and stage.w == 4.0
    assert stage.told(Leave(worker=1)) == []
    assert stage.push(0, 2, 1.0, samples=1) == [0] and stage.w == 5.0


def test_what_is_not_finite_does_not_count_but_its_worker_does() -> None:
    stage = Stage.of(2)
    assert stage.push(0, 1, float("nan"), samples=1) == []
    assert stage.push(1, 1, 2.0, samples=1) == [0, 1] and stage.w == 2.0
    stage.push(0, 2, float("nan"), samples=1)
    assert stage.push(1, 2, float("inf"), samples=1) == [0, 1] and stage.w == 2.0


def test_the_outer_momentum_is_nesterovs() -> None:
    stage = Stage.of(1, outer_lr=0.5, outer_momentum=0.5)
    stage.push(0, 1, 4.0, samples=1)
    assert stage.w == 0.5 * (4 + 0.5 * 4)
    stage.push(0, 2, 2.0, samples=1)
    assert stage.w == 3.0 + 0.5 * (2 + 0.5 * 4)


def test_nobody_waits_for_a_straggler() -> None:
    """Three workers of a second per step, and one of ten: DiLoCo takes as long as that one."""
    cluster = cluster_of(1.0, 1.0, 1.0, 10.0)
    ledgers: list[Ledger] = []
    waits = []
    for settings in ({}, {"quorum": 3}, {"grace_s": 2.0}):
        ledgers.clear()
        strategy = DiLoCo(period=4, on="server", **settings)
        run = play(cluster, strategy, 12, task=Bowls(), prepare=ledgers.extend)
        waits.append(run.each("wait_s")[0])
    assert waits[0] > 100 and waits[1] < 1 and waits[2] < 3 * 2.1
    late: Tensor = torch.tensor([ledger.totals().staleness_max for ledger in ledgers])
    assert late[3] > 0 and not late[:3].any()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"quorum": 2}, "quorum=2: only with on='server'"),
        ({"grace_s": 2.0}, r"grace_s=2\.0: only with on='server'"),
        ({"on": "server", "fragments": 2}, "on='server' with fragments=2: .* leave fragments out"),
        ({"on": "server", "eager": True}, "on='server' with eager=True"),
        ({"on": "server", "quorum": 0}, "quorum=0: a whole number of workers, at least 1"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        DiLoCo(**bad)
