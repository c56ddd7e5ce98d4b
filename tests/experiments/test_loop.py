"""The training loop: what it calls, in which order, and what it seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from offbeat.experiments.job import Job
from offbeat.experiments.loop import REPLICA_VALUE, Callback, Evaluation, seed_step
from offbeat.experiments.summary import summarize
from offbeat.experiments.tasks.base import Batch
from offbeat.experiments.virtual_run import simulate
from offbeat.experiments.virtual_worker import VirtualWorker
from offbeat.strategies.asp import ASP
from offbeat.strategies.bsp import BSP
from offbeat.strategies.selsync import SelSync
from tests.support.virtual_runs import Kept, cluster_of, play

pytestmark = pytest.mark.virtual


@dataclass(frozen=True, kw_only=True)
class Clipped(Kept):
    max_norm: ClassVar[float | None] = 0.5
    lr: float = 0.1


def test_gradients_are_clipped_before_the_optimizer_steps() -> None:
    """From w = 1 with gradients far above the norm, a step of plain descent goes lr · norm far."""
    (weights,) = play(cluster_of(1.0), BSP(), 1, task=Clipped(noise=0.0)).weights
    assert (weights - 1).norm().item() == pytest.approx(0.1 * 0.5, rel=1e-4)
    (free,) = play(cluster_of(1.0), BSP(), 1, task=Kept(noise=0.0, lr=0.1)).weights
    assert (free - 1).norm().item() > 1


class Listening(Callback):
    """Notes every call, by name and number."""

    def __init__(self, fail_at: int = 0) -> None:
        self.heard: list[str] = []
        self._fail_at = fail_at

    def started(self, job: Job, total_steps: int) -> None:
        self.heard.append(f"started {total_steps}")

    def stepped(self, step: int, *_: Any) -> None:
        self.heard.append(f"stepped {step}")
        if step == self._fail_at:
            raise KeyboardInterrupt

    def published(self, step: int, model: nn.Module) -> None:
        self.heard.append(f"published {step}")

    def evaluated(self, history: list[Evaluation], worker_totals: list[Any]) -> None:
        self.heard.append(f"evaluated {history[-1].step} of {len(worker_totals)}")

    def closed(self) -> None:
        self.heard.append("closed")


def run(callback: Callback) -> list[Evaluation]:
    task = Kept()
    job = Job(task=task, strategy=BSP(), workers=2, steps=3, evaluate_every=2)
    return simulate(job, cluster_of(1.0, 1.0), task.load(), lambda ledgers: [callback])


def test_callbacks_hear_of_every_step_and_evaluation_in_order() -> None:
    listening = Listening()
    history = run(listening)
    assert [point.step for point in history] == [2, 3], "the last one follows the last step"
    assert listening.heard == [
        *("started 3", "stepped 1", "stepped 2", "published 2", "evaluated 2 of 2"),
        *("stepped 3", "published 3", "evaluated 3 of 2", "closed"),
    ]


def test_callbacks_are_closed_when_a_run_is_interrupted() -> None:
    listening = Listening(fail_at=1)
    with pytest.raises(KeyboardInterrupt):
        run(listening)
    assert listening.heard == ["started 3", "stepped 1", "closed"]


@pytest.mark.parametrize(
    ("strategy", "apart"),
    [
        (SelSync(delta=1e9, window=2, aggregate="gradients"), True),
        (SelSync(delta=math.inf, window=2), True),
        (SelSync(delta=0.0, aggregate="gradients"), False),
        (SelSync(delta=1e9, window=2), False),
        (BSP(), False),
    ],
    ids=str,
)
def test_where_the_mean_is_nobodys_model_a_replica_is_evaluated_too(strategy: Any, apart: bool) -> None:
    task = Kept(dimension=20, noise=20.0)
    run = play(cluster_of(1.0, 1.0, 1.0), strategy, 9, task=task, evaluate_every=4)
    last = run.history[-1]
    assert all((REPLICA_VALUE in point.extra_metrics) == apart for point in run.history)
    if apart:
        assert last.extra_metrics[REPLICA_VALUE] == task.evaluate(task.built[0], task.load())
        assert last.value < 0.9 * last.extra_metrics[REPLICA_VALUE], "the mean of three has less noise"
    at_once = play(cluster_of(1.0, 1.0, 1.0), strategy, 9, task=Kept(dimension=20, noise=20.0))
    assert all(map(torch.equal, run.weights, at_once.weights)), "looking changes nothing"
    job = Job(task=task, strategy=strategy, workers=3)
    assert summarize(job, "virtual", run.history, [], complete=True)[REPLICA_VALUE] == (
        last.extra_metrics[REPLICA_VALUE] if apart else None
    )


def test_an_evaluation_keeps_the_keys_of_its_file() -> None:
    evaluation = Evaluation(3, 1.5, 0.25, 0.5, 100, {"perplexity": 2.0}, bytes_server=20)
    known = evaluation.to_json()
    assert known == {
        "step": 3,
        "seconds": 1.5,
        "loss": 0.25,
        "value": 0.5,
        "bytes_sent": 100,
        "bytes_server": 20,
        "bytes_total": 120,
        "also": {"perplexity": 2.0},
    }
    assert Evaluation.from_json(known) == evaluation
    older = {key: value for key, value in known.items() if key not in ("bytes_server", "bytes_total")}
    assert Evaluation.from_json(older).bytes_total == 100, "of a version that did not count the server's"


@dataclass(frozen=True, kw_only=True)
class Drawing(Kept):
    """Notes a random number in every gradient."""

    drawn: list[float] = field(default_factory=list, compare=False)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        self.drawn.append(torch.rand(1).item())
        return super().gradient(model, batch)


@pytest.mark.parametrize("inject", [None, (0.5, 0.5)])
def test_a_gradient_draws_the_same_whatever_other_workers_draw(inject: tuple[float, float] | None) -> None:
    """With injection, other virtual workers run between a worker's batch and its gradient."""
    task = Drawing()
    job = Job(task=task, strategy=BSP(), workers=2, steps=2, inject=inject)
    simulate(job, cluster_of(1.0, 3.0), task.load())
    expected = []
    for rank in range(2):
        for step in (1, 2):
            seed_step(0, rank, step)
            expected.append(torch.rand(1).item())
    assert sorted(task.drawn) == sorted(expected)


def test_draws_depend_on_run_worker_and_step_alone() -> None:
    def draw(*key: int) -> float:
        seed_step(*key)
        return torch.rand(1).item()

    keys = [(seed, rank, step) for seed in (0, 1, -5) for rank in (0, 1) for step in (1, 2)]
    drawn = [draw(*key) for key in keys]
    assert len(set(drawn)) == len(keys)
    torch.rand(7)
    assert [draw(*key) for key in reversed(keys)] == drawn[::-1], "whatever was drawn in between"


@pytest.mark.parametrize(("inject", "alone"), [(None, True), ((0.5, 0.5), False)])
def test_worker_0_evaluates_alone_unless_workers_meet_anyway(
    inject: tuple[float, float] | None, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for its samples would wait for the evaluation."""
    looked: list[tuple[int, bool]] = []
    look = VirtualWorker.look

    async def noted(worker: VirtualWorker, show: Any, alone: bool, last: bool) -> None:
        looked.append((worker.rank, alone))
        await look(worker, show, alone, last)

    monkeypatch.setattr(VirtualWorker, "look", noted)
    job = Job(task=Kept(), strategy=ASP(), workers=2, steps=2, evaluate_every=1, inject=inject)
    simulate(job, cluster_of(1.0, 1.0), job.task.load(), lambda _: [])
    assert sorted(looked[:-2]) == ([(0, True)] if alone else [(0, False), (1, False)])
