"""Goodput and money: closed forms of runs in which one worker is away, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from offbeat import BSP, SSP, LocalSGD, Strategy
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.planner.cost import Price, away_seconds
from offbeat.experiments.planner.trials import Trial, attempt, least_minimum
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.worlds.virtual.cluster import Absence, Cluster, ServerMachines, Workers
from offbeat.worlds.virtual.failures import AbsenceSource, RandomFailures
from offbeat.worlds.virtual.outages import ElasticTimes

pytestmark = pytest.mark.virtual

TASK = Quadratic(dimension=100, lr=0.05, batch_size=8)
FREE = {"up_bits_per_s": 1e18, "down_bits_per_s": 1e18}
CLUSTER = Cluster(workers=(Workers(step_s=0.1, count=3, **FREE),), elastic=ElasticTimes(death_s=0.25))
STEPS = 20


@dataclass(frozen=True)
class Planned(AbsenceSource):
    """One absence of worker 2."""

    from_s: float
    until_s: float
    paid_away: bool = False

    def absences(self, worker: int, seed: int, until_s: float) -> list[Absence]:
        return [Absence(worker=2, from_s=self.from_s, until_s=self.until_s)] if worker == 2 else []


def tried(strategy: Strategy[Any], failures: AbsenceSource | None, cluster: Cluster = CLUSTER) -> Trial:
    job = Job(task=TASK, strategy=strategy, workers=3, steps=STEPS, evaluate_every=STEPS, target=-1.0)
    return attempt(job, cluster, TASK.load(), whole=True, failures=failures)


AWAY = Planned(0.25, 0.95)


def test_without_failures_all_steps_count() -> None:
    trial = tried(BSP(), None)
    assert trial.seconds == pytest.approx(2.0)
    assert trial.goodput == pytest.approx(3 * STEPS * 8 / 2.0)
    assert trial.machine_seconds == pytest.approx(3 * 2.0)


def test_bsp_waits_until_a_death_is_known_and_goes_on_by_two() -> None:
    """Worker 2 dies in its third step.

    The others wait for it from 0.3 s until they know, at 0.25 + 0.25 s, and connect for 0.1 s. It is back at
    0.95 s, is named by the exchange of step 7, at 1.0 s, and all connect for 0.1 s. So 0.4 s are lost, and of
    its steps there count two, and those from step 8 on.
    """
    trial = tried(BSP(), AWAY)
    assert trial.seconds == pytest.approx(STEPS * 0.1 + 0.3 + 0.1)
    assert trial.useful == {STEPS: 2 * STEPS + 2 + (STEPS - 7)}
    assert trial.goodput == pytest.approx((2 * STEPS + 2 + 13) * 8 / 2.4)
    assert trial.machine_seconds == pytest.approx(3 * 2.4 - 0.7)
    paid = tried(BSP(), replace(AWAY, paid_away=True))
    assert paid.machine_seconds == pytest.approx(3 * 2.4)


def test_under_local_sgd_the_steps_since_the_last_exchange_are_lost() -> None:
    """Dead before the first exchange, at 0.4 s: its two steps are lost, and the others wait until 0.5 s."""
    trial = tried(LocalSGD(period=4), AWAY)
    assert trial.seconds == pytest.approx(STEPS * 0.1 + 0.2 + 0.1)
    assert trial.useful == {STEPS: 2 * STEPS + 0 + (STEPS - 8)}
    assert trial.goodput == pytest.approx((2 * STEPS + 12) * 8 / 2.3)


def test_at_a_server_the_others_do_what_one_that_is_away_does_not() -> None:
    """It ends its third step, and is away until 0.95 s: 22 + 22 + 3 + 13 batches, the last at 2.25 s."""
    trial = tried(SSP(), AWAY)
    assert trial.seconds == pytest.approx(2.25)
    assert trial.goodput == pytest.approx(3 * STEPS * 8 / 2.25)
    served = replace(CLUSTER, server=ServerMachines(count=2, **FREE))
    assert tried(SSP(), AWAY, served).machine_seconds == pytest.approx((3 + 2) * 2.25 - 0.7)
    assert tried(BSP(), AWAY, served).machine_seconds == pytest.approx(3 * 2.4 - 0.7), "it has no server"


def test_a_server_spares_worker_0() -> None:
    @dataclass(frozen=True)
    class All(AbsenceSource):
        paid_away: bool = False

        def absences(self, worker: int, seed: int, until_s: float) -> list[Absence]:
            return [Absence(worker=worker, from_s=0.25, until_s=0.45)]

    served = tried(SSP(), All())
    assert not served.problem
    assert served.machine_seconds == pytest.approx(3 * served.seconds - 2 * 0.2), "two were away"
    assert tried(BSP(), All()).problem == "all workers were lost before the end"


def test_a_run_that_outlasts_its_schedule_of_failures_is_run_with_a_longer_one() -> None:
    """On a slow network steps take 30x what they compute: the first schedule, of 4x, is too short."""
    slow = Cluster(workers=(Workers(step_s=0.1, count=3, up_bits_per_s=1e3, down_bits_per_s=1e3),))
    horizons = []

    @dataclass(frozen=True)
    class Watched(RandomFailures):
        def absences(self, worker: int, seed: int, until_s: float) -> list[Absence]:
            horizons.append(until_s)
            return super().absences(worker, seed, until_s)

    trial = tried(BSP(), Watched(mtbf_s=1e6, rejoin_s=1.0), slow)
    assert horizons[0] == pytest.approx(8.0)
    assert trial.seconds <= horizons[-1] and trial.seconds > horizons[-1] / 4


def test_the_least_minimum_is_what_a_strategy_can_live_with() -> None:
    from offbeat import OSP

    job = Job(task=TASK, strategy=BSP(), workers=4)
    assert least_minimum(job) == 1
    assert least_minimum(replace(job, strategy=OSP(growth=20))) == 2
    assert least_minimum(replace(job, strategy=LocalSGD(weighted=True))) == 1, "its error is told by the run"
    refused = tried(LocalSGD(weighted=True), AWAY)
    assert refused.problem.startswith("elastic=True with weighted=True")


def test_seconds_away_are_counted_until_the_end() -> None:
    away = [Absence(worker=1, from_s=1.0, until_s=3.0), Absence(worker=2, from_s=2.0)]
    assert away_seconds(away, 0.5) == 0.0
    assert away_seconds(away, 2.5) == pytest.approx(1.5 + 0.5)
    assert away_seconds(away, 10.0) == pytest.approx(2.0 + 8.0)


@pytest.mark.parametrize(
    ("text", "half_an_hour"),
    [("1.2/h", "0.6"), ("$1.2/h", "$0.6"), (" 3 EUR/h", "1.5 EUR"), ("€0.8 /h", "€0.4")],
)
def test_a_price_is_written_as_it_was_given(text: str, half_an_hour: str) -> None:
    price = Price.parse(text)
    assert price.write(price.of(1800)) == half_an_hour


@pytest.mark.parametrize("text", ["", "1.2", "/h", "-1/h", "1.2/min", "$1€/h", "1,2/h"])
def test_other_prices_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingError, match=r"such as 1.2/h or \$1.2/h"):
        Price.parse(text)
