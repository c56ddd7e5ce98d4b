"""Data injection: samples really move, as many as were said, and are counted."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import BSP, DataInjection, LocalSGD, SelSync, SettingError
from offbeat.core.ledger import Ledger, WorkerTotals
from tests.support import loops
from tests.support.both_worlds import job_of, really, virtually
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

Pair = namedtuple("Pair", "x y")
SIZE, STEPS = 8, 5


def _batch(rank: int, step: int) -> torch.Tensor:
    """Samples that say whose they are: rank, step, number."""
    return torch.tensor([[rank, step, number] for number in range(SIZE)], dtype=torch.int16)


def _mixed(alpha: float, beta: float) -> tuple[list[torch.Tensor], list[list[int]], WorkerTotals]:
    rank = dist.get_rank()
    model = loops.mlp()
    with offbeat.attach(model, loops.sgd(model), LocalSGD(period=1000), timeout_s=HANG_S) as sync:
        injection = DataInjection(sync, alpha=alpha, beta=beta, seed=3)
        donors = [injection.donors(step) for step in range(STEPS)]
        mixed = [injection(_batch(rank, step)) for step in range(STEPS)]
        return mixed, donors, sync.metrics


@pytest.mark.parametrize(("world", "alpha", "beta"), [(2, 0.5, 0.5), (4, 0.5, 0.25), (4, 1.0, 1.0)])
def test_everybody_gets_the_donors_samples(
    crew: Callable[[int], Crew], world: int, alpha: float, beta: float
) -> None:
    results = crew(world).run(_mixed, alpha, beta)
    given = round(beta * SIZE)
    schedule = results[0][1]
    assert all(donors == schedule for _, donors, _ in results)
    assert all(len(donors) == round(alpha * world) for donors in schedule)
    for rank, (mixed, _, entry) in enumerate(results):
        for step, batch in enumerate(mixed):
            others = [giver for giver in schedule[step] if giver != rank]
            expected = [_batch(rank, step), *(_batch(giver, step)[:given] for giver in others)]
            assert torch.equal(batch, torch.cat(expected))
        # a broadcast hands on (N−1)/N of its bytes at each rank: 3 numbers of 2 bytes a sample
        assert entry.bytes_sent == sum(len(g) for g in schedule) * (given * 6 * (world - 1) // world)
    assert sum(entry.bytes_sent for _, _, entry in results) > 0
    if alpha < 1:
        assert len({tuple(donors) for donors in schedule}) > 1, "others give in other steps"


def _as(kind: str) -> Any:
    x, y = torch.arange(6.0).view(3, 2) + 10 * dist.get_rank(), torch.arange(3)
    made = {"tensor": x, "tuple": (x, y), "list": [x, y], "dict": {"x": x, "y": y}, "named": Pair(x, y)}[kind]
    model = loops.mlp()
    with offbeat.attach(model, loops.sgd(model), BSP(), timeout_s=HANG_S) as sync:
        mixed = DataInjection(sync, alpha=1.0, beta=0.34)(made)
        assert type(mixed) is type(made)
        return mixed["x"] if kind == "dict" else mixed if kind == "tensor" else mixed[0]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "named"])
def test_batches_of_any_kind(crew: Callable[[int], Crew], kind: str) -> None:
    one, other = crew(2).run(_as, kind)
    assert one.tolist() == [[0, 1], [2, 3], [4, 5], [10, 11]]
    assert other.tolist() == [[10, 11], [12, 13], [14, 15], [0, 1]]


class Alone:
    """What has a port, of one among `world`, which nobody answers."""

    def __init__(self, world: int) -> None:
        self.port: Any = self
        self.world = world
        self.rank = 0
        self.ledger = Ledger(0, lambda: 0.0)


def test_local_batches_shrink_so_that_the_effective_one_stays() -> None:
    assert DataInjection(Alone(4), 0.5, 0.5).local_batch_size(32) == 16
    assert DataInjection(Alone(16), 0.5, 0.5).local_batch_size(100) == 20
    assert DataInjection(Alone(4), 0.0, 0.5).local_batch_size(32) == 32
    assert DataInjection(Alone(1000), 1.0, 1.0).local_batch_size(32) == 1


def test_alone_nothing_is_shared_and_nothing_shrinks() -> None:
    injection = DataInjection(Alone(1), 1.0, 1.0)
    assert injection.local_batch_size(32) == 32
    assert torch.equal(injection(torch.arange(4)), torch.arange(4))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("text", "a batch must be a tensor"),
        (["a", "b"], "a batch must be a tensor"),
        ((), "a batch must be a tensor"),
        (torch.tensor(1.0), "one sample per row"),
        ((torch.ones(2), torch.ones(3)), "equally many rows"),
        (torch.ones(3), "drop_last=True"),
    ],
)
def test_batches_that_cannot_be_shared(batch: Any, said: str) -> None:
    injection = DataInjection(Alone(1), 0.5, 0.5)
    injection(torch.ones(4))
    with pytest.raises(SettingError, match=said):
        injection(batch)


@pytest.mark.parametrize("shares", [(-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_shares_that_are_none(shares: tuple[float, float]) -> None:
    with pytest.raises(SettingError, match="from 0 to 1"):
        DataInjection(Alone(2), *shares)


# --- in the built-in loop, in both worlds


@pytest.mark.parametrize("inject", [None, (0.5, 0.5)], ids=["", "injection"])
@pytest.mark.parametrize("order", ["seldp", "defdp"])
def test_virtual_weights_are_the_real_ones(
    crew: Callable[[int], Crew], order: str, inject: tuple[float, float] | None
) -> None:
    strategy = SelSync(delta=1.0, window=3)
    job = replace(job_of(strategy, 4), order=order, skew=3, inject=inject)
    virtual, real = virtually(job), really(crew(4), job)
    assert virtual.same_weights(real)
    for what in ("steps", "samples", "sync_steps", "local_steps", "lssr"):
        assert [getattr(e, what) for e in virtual.entries] == [getattr(e, what) for e in real.entries], what
    assert sum(e.bytes_sent for e in virtual.entries) == sum(e.bytes_sent for e in real.entries)
    assert virtual.entries[0].local_steps > 0, "samples that travel do not make a step a synchronized one"


def test_injection_costs_its_bytes_and_its_time() -> None:
    """Digits are 64 floats and a label: 264 bytes; of 16 samples 8 are drawn, of 2 donors 4 each."""
    plain = virtually(job_of(LocalSGD(period=1000), 4))
    mixed = virtually(replace(job_of(LocalSGD(period=1000), 4), inject=(0.5, 0.5)))
    assert sum(e.bytes_sent for e in plain.entries) == 0
    steps = Counter(e.steps for e in mixed.entries)
    assert steps == {12: 4}
    assert sum(e.bytes_sent for e in mixed.entries) == 12 * 2 * (4 * 264) * 3
    # each giver trains on 8 + 4 samples, the others on 8 + 4 + 4
    assert sum(e.samples for e in mixed.entries) == 12 * (2 * 12 + 2 * 16)
    assert mixed.history[-1].seconds > plain.history[-1].seconds
    assert {e.sync_steps for e in mixed.entries} == {0}
