"""Virtual time is open to a user's own model and loop: no task, the same costs and weights as with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from offbeat import ASP, BSP, OSP, SSP, LocalSGD, Strategy
from offbeat.core.ledger import WorkerTotals
from offbeat.data.batching import batches
from offbeat.experiments.job import Job
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Absence
from offbeat.worlds.virtual.session import VirtualSession, autograd
from offbeat.worlds.virtual.simulation import run_workers
from tests.support.loops import flat
from tests.support.virtual_runs import Kept, close, cluster_of, ring_s

pytestmark = pytest.mark.virtual

STEPS = 6
LINEAR_BYTES = (32 + 16 + 2) * 4  # 30 weights and a bias, each padded to 64 bytes, and two marks


def build(rank: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(rank)
    model = nn.Linear(30, 1)
    return model, SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def samples(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        inputs = torch.randn(4, 30, generator=generator)
        yield inputs, inputs.sum(1, keepdim=True)


async def train(session: VirtualSession) -> tuple[WorkerTotals, Tensor]:
    for batch in islice(samples(session.rank), STEPS):
        await session.backward(batch, samples=4)
        await session.update()
    return session.ledger.totals(), flat(session.model)


def run(strategy: Strategy[Any], *step_s: float, **cluster: Any) -> list[tuple[WorkerTotals, Tensor] | None]:
    return run_workers(len(step_s), cluster_of(*step_s, **cluster), strategy, build, autograd(loss), train)


def test_a_step_of_bsp_costs_the_slowest_gradient_and_one_ring() -> None:
    results = run(BSP(), 0.1, 0.3, latency_s=1e-4)
    reduce_s = ring_s(LINEAR_BYTES, 2, 1e-4)
    for rank, result in enumerate(results):
        assert result is not None
        totals, _ = result
        assert totals.seconds == close(STEPS * (0.3 + reduce_s))
        assert totals.compute_s == close(STEPS * (0.1, 0.3)[rank])
        assert totals.samples == STEPS * 4
        assert totals.bytes_sent == STEPS * LINEAR_BYTES


def test_bsp_trains_on_the_mean_gradient_from_worker_0s_weights() -> None:
    results = run(BSP(), 0.1, 0.3)
    model, optimizer = build(0)
    for pair in islice(zip(samples(0), samples(1), strict=True), STEPS):
        optimizer.zero_grad()
        (sum(loss(model, batch) for batch in pair) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    for result in results:
        assert result is not None
        assert torch.allclose(result[1], flat(model), atol=1e-6)


@pytest.mark.parametrize(
    "strategy", [BSP(), LocalSGD(period=3, weighted=True), OSP(budget=0.5, growth=0), SSP()], ids=repr
)
def test_an_own_loop_equals_the_loop_of_tasks(strategy: Strategy[Any]) -> None:
    cluster, kept = cluster_of(0.1, 0.2, 0.1), Kept()
    job = Job(
        task=kept, strategy=strategy, workers=3, steps=STEPS, evaluate_every=STEPS, seed=5, work="equal"
    )
    history = simulate(job, cluster, kept.load())
    task, data = Quadratic(dimension=kept.dimension), kept.load()

    def build(rank: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(job.seed)
        model = task.build()
        return model, task.optimizer(model)

    async def train(session: VirtualSession) -> tuple[float, Tensor]:
        order = batches(len(data), session.rank, session.world, task.batch_size, job.seed)
        for step, indices in enumerate(islice(order, STEPS), 1):
            batch = data.batch(indices)
            seed_step(job.seed, session.rank, step)
            await session.backward(batch, samples=len(batch[0]))
            await session.update()
        await session.finish()
        return session.seconds, flat(session.model)

    results = run_workers(3, cluster, strategy, build, task.gradient, train, seed=job.seed)
    assert max(seconds for seconds, _ in filter(None, results)) == history[-1].seconds
    for result, model in zip(results, kept.built, strict=True):
        assert result is not None
        assert torch.equal(result[1], flat(model))


def test_a_worker_that_leaves_for_good_has_no_result() -> None:
    cluster = replace(cluster_of(0.1, 0.1), away=(Absence(worker=1, from_s=0.25),))
    first, second = run_workers(2, cluster, ASP(), build, autograd(loss), train)
    assert first is not None and first[0].steps == STEPS
    assert second is None


def test_an_error_of_the_loop_ends_the_simulation() -> None:
    closed = []

    async def fail(session: VirtualSession) -> None:
        try:
            await session.backward(next(samples(0)), samples=4)
            if session.rank:
                raise RuntimeError("no more data")
            await session.update()
        finally:
            closed.append(session.rank)

    with pytest.raises(RuntimeError, match="no more data"):
        run_workers(2, cluster_of(0.2, 0.1), LocalSGD(period=2), build, autograd(loss), fail)
    assert closed == [1, 0], "worker 0's loop is closed at once, for what it may have opened"
