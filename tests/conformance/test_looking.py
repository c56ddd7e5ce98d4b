"""Looking is free: a run in virtual time is the same, to the last bit, however often it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat import BSP, OSP, SSDSGD, SSP, DiLoCo, LocalSGD
from offbeat.experiments.tasks.base import Batch, Data
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.step_times import Lognormal
from tests.conformance.features import batch_norm
from tests.conformance.table import AnyStrategy, every_strategy
from tests.support import loops
from tests.support.virtual_runs import Kept, Run, cluster_of, play

pytestmark = pytest.mark.virtual

STEPS = 9
COUNTED = [
    "seconds",
    "compute_s",
    "wait_s",
    "communicate_s",
    "bytes_sent",
    "bytes_left_host",
    "bytes_server",
    "steps",
]
STEP_S = 0.004  # a model of 1.9 kB takes 2 ms and more: what is in flight stays so for a while
EQUAL = cluster_of(STEP_S, STEP_S, STEP_S, latency_s=1e-4, update_share=0.1)
UNEQUAL = cluster_of(
    STEP_S, Lognormal(median_s=0.006, sigma=0.5), Lognormal(median_s=0.002, sigma=0.5), latency_s=1e-4
)


@dataclass(frozen=True, kw_only=True)
class Net(Kept):
    """A net with statistics; an evaluation keeps what it saw."""

    models: ClassVar[tuple[str, ...]] = ("net",)
    seen: list[Tensor] = field(default_factory=list, compare=False)

    def build(self) -> nn.Module:
        self.built.append(batch_norm(0))
        return self.built[-1]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return loops.momentum(model)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.enable_grad():
            inputs = torch.randn(8, 20)
            loss = functional.mse_loss(model(inputs), inputs[:, :5])
            loss.backward()
        return loss.detach()

    def evaluate(self, model: nn.Module, data: Data) -> float:
        state = [t.double().flatten() for t in model.state_dict().values()]
        self.seen.append(torch.cat(state))
        return self.seen[-1].sum().item()


def look_every(steps: int, strategy: AnyStrategy, cluster: Cluster) -> tuple[Run, list[Tensor]]:
    task = Net()
    return play(cluster, strategy, STEPS, task=task, evaluate_every=steps), task.seen


@pytest.mark.parametrize("cluster", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@every_strategy
def test_a_run_is_the_same_evaluated_at_each_step_or_never(strategy: AnyStrategy, cluster: Cluster) -> None:
    (often, _), (once, _) = look_every(1, strategy, cluster), look_every(STEPS, strategy, cluster)
    assert [len(run.history) for run in (often, once)] == [STEPS, 1]
    assert often.history[-1] == replace(once.history[-1], loss=often.history[-1].loss)
    for counted in COUNTED:
        assert often.each(counted) == once.each(counted), counted
    assert all(map(torch.equal, often.weights, once.weights))
    assert [e.seconds for e in often.history] == sorted(e.seconds for e in often.history)


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=4)], ids=str)
def test_an_evaluation_sees_the_model_of_its_step_though_workers_have_trained_on(
    strategy: AnyStrategy,
) -> None:
    """With nothing in flight, it sees what a run that ends there would see, whoever is ahead of whom."""
    _, seen = look_every(1, strategy, UNEQUAL)
    for step in range(1, STEPS + 1):
        task = Net()
        play(UNEQUAL, strategy, step, task=task)
        assert torch.equal(task.seen[-1], seen[step - 1]), step


@pytest.mark.parametrize(
    "strategy", [OSP(budget=0.9, growth=0), SSDSGD(warmup=0, delay=3), DiLoCo(period=4, delay=2)], ids=str
)
def test_what_is_in_flight_is_not_in_the_model_until_its_step(strategy: AnyStrategy) -> None:
    """It is at the end of a run, which waits for it: the same step, looked at in mid-run, lacks it."""
    _, seen = look_every(1, strategy, EQUAL)
    task = Net()
    play(EQUAL, strategy, 5, task=task)
    if isinstance(strategy, DiLoCo):  # its global weights change when they are merged, and not before
        first_layer = task.built[0][0].weight.numel()  # type: ignore[index]
        assert torch.equal(seen[4][:first_layer], seen[3][:first_layer])
    else:
        assert not torch.equal(seen[4], task.seen[-1])


def test_a_server_answers_at_once() -> None:
    """Under SSP the pushes that have arrived are in the model; worker 0 alone looks, and waits for nobody."""
    run, seen = look_every(1, SSP(staleness=1), UNEQUAL)
    assert len({tuple(each.tolist()) for each in seen}) == STEPS
    assert run.history[0].seconds < run.history[-1].seconds
