"""Elastic workers in virtual time: without faults as any others; with faults, closed forms in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from offbeat import BSP, OSP, SSP, DiLoCo, ErrorFeedback, LocalSGD, PowerSGD, SelSync, TopK
from offbeat.core.ledger import WorkerTotals
from offbeat.core.membership import BEAT_S, NEWS_S, SILENT_LOOKS
from offbeat.errors import RankLost, SettingError
from offbeat.worlds.virtual.cluster import Absence, Cut, Hang
from offbeat.worlds.virtual.elastic.crew import run_elastic_workers
from offbeat.worlds.virtual.outages import ElasticTimes
from offbeat.worlds.virtual.rates import ChangingRate
from offbeat.worlds.virtual.session import VirtualSession, autograd
from offbeat.worlds.virtual.simulation import run_workers
from tests.support import loops
from tests.support.elastic import Bowl
from tests.support.elastic_forms import bsp
from tests.support.elastic_virtual import play_elastic
from tests.support.virtual_runs import BYTES_PER_S, close, cluster_of, ring_s

pytestmark = pytest.mark.virtual

FAULTLESS = [
    BSP(),
    BSP(codec=ErrorFeedback(TopK(0.1))),
    BSP(codec=ErrorFeedback(PowerSGD(2))),
    LocalSGD(period=3),
    SelSync(delta=0.1, window=2, late=True),
    DiLoCo(period=4, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0, average=0.5),
    OSP(budget=0.5, growth=2),
]


GRADIENT = autograd(lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]))


def _build(rank: int) -> Any:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 5))
    return model, loops.momentum(model)


async def _train(session: VirtualSession) -> Any:
    seen: list[dict[str, Tensor]] = []

    def look(_: list[WorkerTotals]) -> None:
        seen.append(loops.tensors(session.model))

    for step, batch in enumerate(loops.batches(session.rank, 9), 1):
        await session.backward(batch, samples=len(batch[0]))
        await session.update()
        if step == 4:  # with exchanges in flight
            await session.look(look)
    own = loops.tensors(session.model)
    await session.finish()
    await session.look(look, wait=True)
    return own, seen, session.ledger.totals()


@pytest.mark.parametrize("strategy", FAULTLESS, ids=str)
def test_without_faults_nothing_changes(strategy: Any) -> None:
    """Not a bit of the weights, no byte, no second."""
    drop = ChangingRate(8 * BYTES_PER_S, ((2.5, BYTES_PER_S),))
    even = cluster_of(1.0, 1.3, 0.9, latency_s=0.01)
    cluster = replace(even, workers=tuple(replace(group, up_bits_per_s=drop) for group in even.workers))
    plain = run_workers(3, cluster, strategy, _build, GRADIENT, _train)
    elastic = run_elastic_workers(3, cluster, strategy, _build, GRADIENT, _train, minimum=2)
    seen = plain[0][1]  # in plain runs, only worker 0 looks
    for (own, _, totals), (own_2, seen_2, totals_2) in zip(plain, elastic, strict=True):
        assert loops.equal(own, own_2)
        assert len(seen) == 2
        assert all(loops.equal(one, other) for one, other in zip(seen, seen_2, strict=True))
        assert totals.bytes_sent == totals_2.bytes_sent
        assert totals.seconds == close(totals_2.seconds)
        assert (totals_2.rosters, totals_2.lost_steps, totals_2.lost_s) == (1, 0, 0.0)


# --- seconds: Bowl has 32 numbers of 8 bytes, in two parameters that are padded to 64 bytes

STEPS, AT = 12, 5
BLOCK, SEEN = 20 * 8 + 12 * 8 + 64 + 16, 16  # with marks, and the buffer


def exchange_s(world: int) -> float:
    """Return the seconds of BSP's exchange: gradients, then buffers, one after the other."""
    return ring_s(BLOCK, world) + ring_s(SEEN, world)


def test_sizes_are_as_assumed() -> None:
    run = play_elastic(cluster_of(1.0, 1.0, 1.0), BSP(), STEPS)
    assert run.ends[0].seconds == close(STEPS * (1 + exchange_s(3)))


def test_death_in_an_exchange_costs_detection_connection_and_the_exchange_anew() -> None:
    """The exchange of step 6 begins at `begun`; worker 2 dies in it."""
    times = ElasticTimes(death_s=0.4, connect_s=0.3)
    begun = AT * (1 + exchange_s(4)) + 1
    died = begun + exchange_s(4) / 2
    death = Absence(worker=2, from_s=died)
    run = play_elastic(cluster_of(1.0, 1.0, 1.0, 1.0, away=(death,), elastic=times), BSP(), STEPS)
    end = run.ends[0]
    detected = died + 0.4
    assert end.seconds == close(detected + 0.3 + exchange_s(3) + (STEPS - AT - 1) * (1 + exchange_s(3)))
    everyone = tuple(f"rank000{n}-0" for n in range(4))
    left = (*everyone[:2], everyone[3])
    assert end.rosters == [everyone] * AT + [left] * (STEPS - AT)
    torch.testing.assert_close(end.weights, bsp(end.rosters))
    totals = [ledger.totals() for ledger in run.ledgers]
    assert [total.rosters for total in totals] == [2, 2, 1, 2]
    assert totals[0].lost_s == close(detected + 0.3 - begun)
    assert [total.lost_steps for total in totals] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("outage", "known_s"),
    [
        ({"away": (Absence(worker=0, from_s=5.5),)}, NEWS_S),
        ({"hung": (Hang(worker=0, from_s=5.5),)}, BEAT_S * SILENT_LOOKS),
        ({"hung": (Hang(worker=0, from_s=5.5, until_s=100.0),)}, BEAT_S * SILENT_LOOKS),
        ({"cut_off": (Cut(workers=(0,), from_s=5.5, until_s=100.0),)}, BEAT_S * SILENT_LOOKS),
    ],
    ids=str,
)
def test_detection_takes_as_long_as_over_processes(outage: Any, known_s: float) -> None:
    """Worker 0 is lost in the middle of step 6 of LocalSGD, whose others then wait in an exchange."""
    cluster = cluster_of(1.0, 1.0, 1.0, **outage)
    run = play_elastic(cluster, LocalSGD(period=6), 6)
    waited_until = max(6.0, 5.5 + known_s)
    weights = 20 * 8 + 12 * 8 + 64
    expected = waited_until + 0.1 + ring_s(weights, 2) + ring_s(SEEN, 2)
    assert run.ends[1].seconds == close(expected)
    assert sorted(run.ends) == [1, 2]
    assert run.ledgers[0].lost_steps == 5


def test_hang_that_ends_in_time_is_not_noticed() -> None:
    """The process computes later by as long as it hung; the others wait."""
    hang = Hang(worker=1, from_s=2.5, until_s=6.0)
    run = play_elastic(cluster_of(1.0, 1.0, hung=(hang,)), BSP(), 4)
    assert run.ends[0].seconds == close(4 * (1 + exchange_s(2)) + 3.5)
    assert run.ledgers[0].rosters == 1


def test_worker_that_returns_gets_the_state_over_the_network() -> None:
    """It asks at 3.2 s, is named when the exchange of step 3 ends, at 3.3 s, and admitted before step 4."""
    away = Absence(worker=1, from_s=1.5, until_s=3.2)
    times = ElasticTimes(death_s=0.1, connect_s=0.3)
    run = play_elastic(cluster_of(1.0, 1.0, 1.0, away=(away,), elastic=times), BSP(), 8, momentum=0.5)
    first, back = run.ends[0], run.ends[1]
    assert (back.name, back.joined_at) == ("rank0001-1", 3)
    assert back.momentum == first.momentum
    assert torch.equal(back.weights, first.weights)
    exchanged = (6 * 2 * (3 - 1) + 2 * 2 * (2 - 1)) * (BLOCK + SEEN)  # 6 steps of three workers, 2 of two
    state = sum(ledger.bytes_sent for ledger in run.ledgers) - exchanged
    assert state > 2 * 32 * 8  # weights and momentum
    rebuilt, admitted = 0.3, 0.3 + state / BYTES_PER_S
    exchanges = exchange_s(3) + 2 * exchange_s(2) + 5 * exchange_s(3)
    assert first.seconds == close(8 + exchanges + rebuilt + admitted)


def test_worker_that_dies_as_it_returns_returns_later() -> None:
    """Its new process ends before it has run at all."""
    away = (Absence(worker=2, from_s=2.5, until_s=4.0), Absence(worker=2, from_s=4.0, until_s=6.0))
    once = Absence(worker=2, from_s=2.5, until_s=6.0)
    twice, alike = (
        play_elastic(cluster_of(1.0, 1.0, 1.0, away=absences), BSP(), 12) for absences in (away, (once,))
    )
    assert twice.ends[2].joined_at == alike.ends[2].joined_at > 5
    assert torch.equal(twice.ends[2].published, alike.ends[2].published)


def test_local_steps_of_the_dead_are_counted_as_lost() -> None:
    death = Absence(worker=1, from_s=5.5)
    run = play_elastic(cluster_of(1.0, 1.0, 1.0, away=(death,)), LocalSGD(period=4), 8)
    assert run.ledgers[1].lost_steps == 1  # the fifth; the first four were averaged
    assert run.ledgers[0].steps == 8


def test_minority_stops_with_an_error_in_words() -> None:
    deaths = tuple(Absence(worker=worker, from_s=2.5) for worker in (0, 2))
    run = play_elastic(cluster_of(1.0, 1.0, 1.0, away=deaths), BSP(), 8, minimum=2)
    assert "1 of 3 workers are left (rank0001-0), but at least 2 must be" in str(run.error)


def test_the_error_of_a_run_is_not_that_of_a_newcomer_who_gave_up_before() -> None:
    """Worker 3 returns at 2.5 and waits for 3 s; the others exchange nothing until step 10."""
    outages = (Absence(worker=3, from_s=1.5, until_s=2.5), Absence(worker=2, from_s=8.0))
    times = ElasticTimes(timeout_s=3.0)
    cluster = cluster_of(1.0, 1.0, 1.0, 1.0, away=outages, elastic=times)
    run = play_elastic(cluster, LocalSGD(period=10), 20, minimum=3)
    assert "2 of 4 workers are left (rank0000-0, rank0001-0), but at least 3 must be" in str(run.error)


def test_newcomer_that_is_not_admitted_in_time_asks_again() -> None:
    """Worker 3 returns at 2.5 and waits for 3 s, three times; the others exchange at 10 and admit it."""
    outages = (Absence(worker=3, from_s=1.5, until_s=2.5),)
    cluster = cluster_of(1.0, 1.0, 1.0, 1.0, away=outages, elastic=ElasticTimes(timeout_s=3.0))
    run = play_elastic(cluster, LocalSGD(period=10), 20)
    assert run.ends[3].joined_at == 10
    assert run.ends[3].name == "rank0003-3"
    # away from 1.5 on, and then not admitted yet: it waited for all but its own steps
    assert run.ledgers[3].compute_s == close(1.5 + 10 * 1.0)
    assert run.ledgers[3].wait_s == close(run.ends[3].seconds - 11.5)


def test_minority_that_is_cut_off_decides_nothing() -> None:
    """Workers 1 and 2 reach each other, but not the store; they come back as newcomers."""
    cut = Cut(workers=(1, 2), from_s=2.5, until_s=12.0)
    run = play_elastic(cluster_of(1.0, 1.0, 1.0, 1.0, 1.0, cut_off=(cut,)), BSP(), 12, minimum=2)
    assert [run.ends[rank].joined_at > 3 for rank in range(5)] == [False, True, True, False, False]
    decided = {entry.roster for entry in run.committed["rank0001-0"] if entry.epoch > 1}
    assert decided == set()
    assert all(torch.equal(end.published, run.ends[0].published) for end in run.ends.values())


def test_all_are_lost() -> None:
    deaths = tuple(Absence(worker=worker, from_s=2.5) for worker in (0, 1))
    run = play_elastic(cluster_of(1.0, 1.0, away=deaths), BSP(), 8)
    assert "all workers were lost" in str(run.error)


def test_strategies_with_a_server_are_refused() -> None:
    def build(rank: int) -> Any:
        model = Bowl(rank)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(SettingError, match="has a parameter server"):
        run_elastic_workers(2, cluster_of(1.0, 1.0), SSP(), build, GRADIENT, _train)


def test_hung_and_cut_workers_need_elastic_ones() -> None:
    cluster = cluster_of(1.0, 1.0, hung=(Hang(worker=0, from_s=1.0, until_s=2.0),))
    with pytest.raises(SettingError, match="only elastic workers outlive"):
        run_workers(2, cluster, BSP(), _build, GRADIENT, _train)


def test_error_of_a_minority_is_raised() -> None:
    death = Absence(worker=0, from_s=2.5)
    cluster = cluster_of(1.0, 1.0, away=(death,))
    with pytest.raises(RankLost, match="at least 2 must be"):
        run_elastic_workers(2, cluster, BSP(), _build, GRADIENT, _train, minimum=2)
