"""Short runs in virtual time: small tasks on clusters whose seconds can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from offbeat import Strategy
from offbeat.core.ledger import Ledger
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.tasks.base import Batch, Data
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Cluster, Workers
from tests.support.loops import flat

AnyStrategy = Strategy[Any]
BYTES_PER_S = 1e6
MIB = 1 << 20


def close(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


def cluster_of(*step_s: Any, latency_s: float = 0.0, **rest: Any) -> Cluster:
    """One worker for each step time, on equal links of 1 MB/s."""
    bits_per_s = 8 * BYTES_PER_S
    groups = [
        Workers(step_s=s, up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, latency_s=latency_s)
        for s in step_s
    ]
    return Cluster(workers=tuple(groups), **rest)


@dataclass(frozen=True, kw_only=True)
class Kept(Quadratic):
    """The quadratic task; the models that were built stay at hand: each worker has one, outside cohorts."""

    dimension: int = 1000
    built: list[nn.Module] = field(default_factory=list, compare=False)

    @property
    def stacks(self) -> bool:
        return False

    def build(self) -> nn.Module:
        self.built.append(super().build())
        return self.built[-1]


@dataclass
class Run:
    history: list[Evaluation]
    ledgers: list[Ledger]
    weights: list[Tensor]

    @property
    def seconds(self) -> float:
        return self.history[-1].seconds

    def each(self, what: str) -> list[float]:
        return [getattr(ledger.totals(), what) for ledger in self.ledgers]


def play(
    cluster: Cluster,
    strategy: AnyStrategy,
    steps: int,
    *,
    task: Kept | None = None,
    evaluate_every: int | None = None,
    seed: int = 0,
    work: str = "equal",
    prepare: Callable[[list[Ledger]], None] = lambda ledgers: None,
    schedule: str = "constant",
) -> Run:
    """A virtual run, evaluated only at its end unless told otherwise."""
    task = task or Kept()
    job = Job(
        task=task,
        strategy=strategy,
        workers=cluster.size,
        steps=steps,
        evaluate_every=evaluate_every or steps,
        seed=seed,
        schedule=schedule,
        work=work,
    )
    ledgers: list[Ledger] = []

    def watchers(books: list[Ledger]) -> list[Any]:
        ledgers.extend(books)
        prepare(books)
        return []

    history = simulate(job, cluster, task.load(), watchers)
    return Run(history, ledgers, [flat(model) for model in task.built])


def ring_s(nbytes: int, world: int, latency_s: float = 0.0, operation_s: float = 0.0) -> float:
    on_wire = 2 * (world - 1) / world * nbytes
    return on_wire / BYTES_PER_S + 2 * (world - 1) * latency_s + operation_s


WEIGHTS = 1008 * 4  # 1000 floats, padded to 64 bytes
MARKED = WEIGHTS + 4  # and a mark


@dataclass(frozen=True, kw_only=True)
class Layers(Kept):
    """Parameters of some MiB, in forward order; their gradients cost nothing to make."""

    models: ClassVar[tuple[str, ...]] = ("layers",)
    sizes_mib: tuple[int, ...] = (1, 8, 1)  # the last is the first block, as backward completes it

    def build(self) -> nn.Module:
        sizes = [mib * MIB // 4 for mib in self.sizes_mib]
        self.built.append(nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes]))
        return self.built[-1]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        for param in model.parameters():
            param.grad = param.detach() - 1
        return torch.zeros(())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        return 0.0


def keep_spans(ledgers: Any) -> None:
    for ledger in ledgers:
        ledger.spans = []
