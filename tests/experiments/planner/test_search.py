"""The search, on clusters where the right choice is known beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat import BSP, LocalSGD
from offbeat.experiments.job import Job
from offbeat.experiments.planner.candidates import CANDIDATES, candidates
from offbeat.experiments.planner.ranking import Outcome, ranked
from offbeat.experiments.planner.search import MARGIN, search
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.worlds.virtual.cluster import Cluster, Workers

pytestmark = pytest.mark.virtual

STEP_S = 0.1
TASK = Quadratic(dimension=1000, lr=0.05)
ALIKE = (STEP_S,) * 4
SLOW = 8e3  # bits a second: the task's vector takes 6 s in a ring of four


def cluster_of(*step_s: float, bits_per_s: float) -> Cluster:
    return Cluster(
        workers=tuple(Workers(step_s=s, up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s) for s in step_s)
    )


def outcomes_on(cluster: Cluster, strategies: Any = CANDIDATES, **more: Any) -> list[Outcome]:
    given: dict[str, Any] = {"steps": 36, "evaluate_every": 4, **more}
    job = Job(task=TASK, strategy=BSP(), workers=cluster.size, **given)
    return list(search(job, strategies, [0], cluster, TASK.load()))


def test_where_the_network_is_free_nobody_steps_faster_than_bsp() -> None:
    outcomes = outcomes_on(cluster_of(*ALIKE, bits_per_s=1e18))
    assert len(outcomes) == len(CANDIDATES)
    for outcome in outcomes:
        (trial,) = outcome.trials
        assert not trial.problem
        for point in trial.history:
            assert point.seconds >= STEP_S * point.step * (1 - 1e-9), outcome.label
    last = outcomes[0].trials[0].history[-1]
    assert last.seconds == pytest.approx(STEP_S * last.step, rel=1e-9)


@pytest.fixture(scope="module")
def on_a_slow_network() -> list[Outcome]:
    return outcomes_on(cluster_of(*ALIKE, bits_per_s=SLOW))


def test_where_the_network_is_slow_the_one_who_seldom_speaks_is_chosen(
    on_a_slow_network: list[Outcome],
) -> None:
    best = ranked(on_a_slow_network)[0]
    assert best.strategy.name in ("local_sgd", "diloco")
    assert best.strategy.settings()["period"] == 32
    checked = 0
    for outcome in on_a_slow_network:
        reached = outcome.trials[0].reached
        if isinstance(outcome.strategy, BSP | LocalSGD) and outcome.strategy.codec is None and reached:
            exchanges = reached.step // getattr(outcome.strategy, "period", 1)
            sent = reached.bytes_sent / 4  # by each worker
            assert sent == pytest.approx(exchanges * 2 * 3 / 4 * 4 * TASK.dimension, rel=0.01)
            assert outcome.seconds.mean == pytest.approx(STEP_S * reached.step + 8 * sent / SLOW, rel=1e-6)
            checked += 1
    assert checked >= 3


def test_where_one_is_slow_one_that_need_not_wait_is_chosen() -> None:
    outcomes = outcomes_on(cluster_of(STEP_S, STEP_S, STEP_S, 8 * STEP_S, bits_per_s=1e9), target=100.0)
    best, bsp = ranked(outcomes)[0], outcomes[0]
    assert best.strategy.server_half() is not None, "it has a server"
    assert best.seconds.mean is not None
    assert bsp.seconds.mean is not None
    assert best.seconds.mean < bsp.seconds.mean / 2


def test_who_is_slower_than_the_best_so_far_is_stopped_and_said_to_be(
    on_a_slow_network: list[Outcome],
) -> None:
    best_s = on_a_slow_network[0].seconds.mean
    stopped = 0
    for outcome in on_a_slow_network:
        (trial,) = outcome.trials
        assert best_s is not None
        if trial.stopped:
            stopped += 1
            assert trial.reached is None
            assert trial.seconds > MARGIN * best_s
            assert outcome.failure == f"stopped at {trial.seconds:.3g} s"
        elif outcome.seconds.mean is not None:
            best_s = min(best_s, outcome.seconds.mean)
    assert stopped > 3


def test_without_a_target_it_is_what_bsp_ended_at_less_half_a_percent() -> None:
    bsp = outcomes_on(cluster_of(*ALIKE, bits_per_s=1e9), candidates(["bsp"])[:1])[0]
    last = bsp.trials[0].history[-1].value
    assert bsp.trials[0].job.target == pytest.approx(1.005 * last)
    assert bsp.succeeds
