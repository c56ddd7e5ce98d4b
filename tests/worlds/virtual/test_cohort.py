"""Workers that are alike are computed together, and nothing shows it: every bit is as if each were alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor

from offbeat import ASP, BSP, DiLoCo, LocalSGD, SelSync, Strategy, TopK
from offbeat.core.blocks import Layout
from offbeat.core.ledger import Ledger, Span, WorkerTotals
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Evaluation, Worker
from offbeat.experiments.tasks import Batch, task
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual import simulation
from offbeat.worlds.virtual.cluster import Absence, Cluster, Site, Slowdown, Workers
from offbeat.worlds.virtual.cohort import find_cohorts
from offbeat.worlds.virtual.step_times import Lognormal
from tests.support.virtual_runs import cluster_of

pytestmark = pytest.mark.virtual

STEPS = 7
UNEVEN = Cluster(
    workers=tuple(
        Workers(step_s=step_s, up_bits_per_s=8e6, down_bits_per_s=8e6, latency_s=1e-4, count=n, site=site)
        for step_s, n, site in ((0.05, 2, "here"), (0.08, 4, "here"), (0.05, 3, "there"))
    ),
    sites=(Site(name="here", up_bits_per_s=2e6, latency_s=0.01), Site(name="there")),
    slow=(Slowdown(workers=(3, 4), factor=2.0, from_s=0.2),),
    operation_s=2e-4,
    update_share=0.1,
)


class Watched(Callback):
    """What worker 0 sees at each step and evaluation."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.totals: list[list[WorkerTotals]] = []

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self.losses.append(loss)

    def published(self, step: int, model: nn.Module) -> None:
        self.weights.append(model.get_parameter("w").detach().clone())

    def evaluated(self, history: list[Evaluation], worker_totals: list[WorkerTotals]) -> None:
        self.totals.append(worker_totals)


@dataclass
class Seen:
    history: list[Evaluation]
    watched: Watched
    timeline: list[list[Span]]


def run(strategy: Strategy[Any], cluster: Cluster, dimension: int) -> Seen:
    ledgers: list[Ledger] = []
    watched = Watched()

    def watch(of_workers: list[Ledger]) -> list[Callback]:
        ledgers.extend(of_workers)
        for ledger in ledgers:
            ledger.spans = []
        return [watched]

    what = Quadratic(dimension=dimension)
    job = Job(task=what, strategy=strategy, workers=cluster.size, steps=STEPS, evaluate_every=3, seed=5)
    history = simulate(job, cluster, what.load(), watch)
    return Seen(history, watched, [list(ledger.spans or ()) for ledger in ledgers])


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=1), LocalSGD(period=3)], ids=str)
@pytest.mark.parametrize(
    ("cluster", "dimension", "cohorts"),
    [
        pytest.param(cluster_of(*[0.05] * 5), 100, 1, id="added as a ring"),
        pytest.param(cluster_of(*[0.05] * 40), 48, 1, id="added as a stack"),
        pytest.param(UNEVEN, 19, 5, id="several speeds"),
    ],
)
def test_a_cohort_equals_single_workers_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy[Any], cluster: Cluster, dimension: int, cohorts: int
) -> None:
    found: list[Any] = []

    def find(*what: Any) -> list[range] | None:
        found.append(find_cohorts(*what))
        return found[-1]

    monkeypatch.setattr(simulation, "find_cohorts", find)
    together = run(strategy, cluster, dimension)
    assert len(found[0]) == cohorts
    monkeypatch.setattr(simulation, "find_cohorts", lambda *what: None)
    alone = run(strategy, cluster, dimension)
    assert together.history == alone.history
    assert together.watched.totals == alone.watched.totals
    assert together.timeline == alone.timeline
    assert torch.equal(torch.stack(together.watched.losses), torch.stack(alone.watched.losses))
    assert torch.equal(torch.stack(together.watched.weights), torch.stack(alone.watched.weights))


@dataclass(frozen=True, kw_only=True)
class Shifted(Quadratic):
    """A task with a gradient of its own."""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().gradient(model, batch)
        model.get_parameter("w").grad += 1
        return loss


def test_a_gradient_that_a_subclass_changes_is_not_stacked_without_the_change() -> None:
    assert Quadratic().stacks
    assert not Shifted().stacks
    assert not task("digits").stacks


def cohorts_of(
    cluster: Cluster,
    strategy: Strategy[Any] | None = None,
    model: nn.Module | None = None,
    optimizer: type[torch.optim.Optimizer] = SGD,
) -> list[range] | None:
    model = model or nn.Linear(2, 1)
    return find_cohorts(cluster, strategy or BSP(), model, optimizer(model.parameters(), lr=0.1))  # type: ignore[call-arg]


def test_cohorts_are_neighbours_of_one_speed() -> None:
    assert cohorts_of(UNEVEN) == [range(2), range(2, 3), range(3, 5), range(5, 6), range(6, 9)]
    mixed = cluster_of(0.1, 0.1, Lognormal(median_s=0.1, sigma=0.2), Lognormal(median_s=0.1, sigma=0.2), 0.1)
    assert cohorts_of(mixed) == [range(2), range(2, 3), range(3, 4), range(4, 5)]


@pytest.mark.parametrize(
    "strategy",
    [
        BSP(codec=TopK(ratio=0.1)),
        LocalSGD(weighted=True),
        LocalSGD(codec=TopK(ratio=0.1)),
        DiLoCo(),
        ASP(),
        SelSync(),
    ],
    ids=str,
)
def test_strategies_that_are_not_rowwise_make_no_cohorts(strategy: Strategy[Any]) -> None:
    assert cohorts_of(cluster_of(0.1, 0.1), strategy) is None


def test_what_a_row_cannot_do_makes_no_cohorts() -> None:
    equal = cluster_of(0.1, 0.1)
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad_(False)
    assert cohorts_of(equal) == [range(2)]
    assert cohorts_of(cluster_of(0.1, 0.2)) is None
    assert cohorts_of(replace(equal, away=(Absence(worker=1, from_s=1.0, until_s=2.0),))) is None
    assert cohorts_of(equal, model=frozen) is None
    assert cohorts_of(equal, model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    assert cohorts_of(equal, optimizer=Adafactor) is None  # means over rows of a matrix


@dataclass(frozen=True, kw_only=True)
class Changed(LocalSGD):
    """A strategy that is not what its base is, and does not claim to be."""

    async def step(self, state: Any, replica: Replica, port: Port) -> None:
        await replica.update()


def test_a_subclass_does_not_inherit_the_claim_to_be_rowwise() -> None:
    assert cohorts_of(cluster_of(0.1, 0.1), LocalSGD()) is not None
    assert cohorts_of(cluster_of(0.1, 0.1), Changed()) is None


@dataclass(frozen=True, kw_only=True)
class Scatters(LocalSGD):
    """A strategy that claims to be rowwise, but exchanges slices."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(model, rowwise=True)

    async def step(self, state: Any, replica: Replica, port: Port) -> None:
        await port.reduce_scatter(list(replica.weights[0].chunk(port.world)))


@dataclass(frozen=True, kw_only=True)
class Counts(LocalSGD):
    """A strategy that claims to be rowwise, but sums a number of its own."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(model, rowwise=True)

    async def step(self, state: Any, replica: Replica, port: Port) -> None:
        await port.all_reduce(torch.ones(1))


@pytest.mark.parametrize("strategy", [Scatters(), Counts()], ids=lambda each: type(each).__name__)
def test_a_strategy_that_is_not_what_it_claims_is_refused(strategy: Strategy[Any]) -> None:
    with pytest.raises(OffbeatError, match="let `rowwise` of its layout be False"):
        run(strategy, cluster_of(0.1, 0.1), 4)
