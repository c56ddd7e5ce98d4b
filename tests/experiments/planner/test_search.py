"""The search, on clusters where the right choice is known beforehand."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest

from offbeat import BSP, SSDSGD, LocalSGD, Strategy
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.planner import search as search_module
from offbeat.experiments.planner.candidates import CANDIDATES, candidates
from offbeat.experiments.planner.ranking import Outcome, ranked
from offbeat.experiments.planner.search import MARGIN, search
from offbeat.experiments.planner.trials import Trial
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
        if outcome.strategy == SSDSGD(on="server"):
            assert "the server, which cannot run a Descent" in trial.problem
            continue
        assert not trial.problem, outcome.label
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
    assert best.strategy.settings()["period"] >= 16
    checked = 0
    for outcome in on_a_slow_network:
        reached = outcome.trials[0].reached
        if isinstance(outcome.strategy, BSP | LocalSGD) and outcome.strategy.codec is None and reached:
            for point in (*outcome.trials[0].history, reached):
                sent = point.bytes_total / 4  # by each worker
                assert point.seconds == pytest.approx(STEP_S * point.step + 8 * sent / SLOW, rel=1e-6)
                if point is not reached:
                    exchanges = point.step // getattr(outcome.strategy, "period", 1)
                    assert sent == pytest.approx(exchanges * 2 * 3 / 4 * 4 * TASK.dimension, rel=0.01)
            assert outcome.seconds.mean == reached.seconds
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


# --- more seeds


def searched(seconds: dict[Strategy[Any], list[float]], most: int, seeds: Any = (0,)) -> dict[str, Outcome]:
    """Search among strategies whose seconds to the target are known beforehand, by seed."""

    def attempt(job: Job, *args: Any) -> Trial:
        until = seconds[job.strategy][job.seed]
        return Trial(job, (Evaluation(10, until, 0.0, 1.0, 100),), until, start=math.nan)

    job = Job(task=TASK, strategy=BSP(), workers=4, target=1.0)
    with patch.object(search_module, "attempt", attempt):
        cluster = cluster_of(*ALIKE, bits_per_s=1e9)
        found = search(job, list(seconds), seeds, cluster, TASK.load(), most_seeds=most)
        return {outcome.label: outcome for outcome in found}


def test_one_that_loses_with_the_first_seed_is_first_if_it_wins_with_the_others() -> None:
    """As period 4 did: 1.27x slower with seed 0, it was stopped, and ranked last."""
    found = searched(
        {
            BSP(): [5.69, 6.8, 6.7, 6.6, 6.7],
            LocalSGD(period=2): [5.39, 6.9, 7.0, 7.1, 7.0],
            LocalSGD(period=4): [6.85, 5.3, 5.4, 5.2, 5.3],
            LocalSGD(period=32): [10.4, 9.0, 9.0, 9.0, 9.0],
        },
        most=5,
    )
    assert ranked(list(found.values()))[0].label == "local_sgd period=4"
    assert len(found["local_sgd period=4"].trials) == 5
    assert len(found["local_sgd period=32"].trials) == 1, "1.5x slower with the first seed"


def test_who_is_apart_gets_no_more_seeds_and_who_is_equal_neither() -> None:
    leader = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0]
    found = searched(
        {
            BSP(): [1.3 * second * (1 + 0.001 * (second > 1)) for second in leader],
            LocalSGD(): leader,
            LocalSGD(period=2): [1.001 * second * (1 + 0.0001 * (second > 1)) for second in leader],
            LocalSGD(period=4): [1.15, 1.0, 1.05, 1.1, 1.1, 1.1],
        },
        most=6,
    )
    assert {label: len(outcome.trials) for label, outcome in found.items()} == {
        "bsp": 2,
        "local_sgd period=2": 2,
        "local_sgd": 6,
        "local_sgd period=4": 6,
    }


def test_the_first_seeds_are_for_all_that_reached_the_target() -> None:
    found = searched(
        {BSP(): [1.0, 1.0, 1.0], LocalSGD(): [1.2, 1.2, 1.2], LocalSGD(period=2): [1.6, 1.0, 1.0]},
        most=2,
        seeds=(0, 1, 2),
    )
    assert [len(outcome.trials) for outcome in found.values()] == [3, 3, 3], "none was stopped here"


def test_a_target_that_needs_no_training_is_refused() -> None:
    with pytest.raises(SettingError, match="the untrained model is at 275 with seed 0, so every strategy"):
        outcomes_on(cluster_of(*ALIKE, bits_per_s=1e9), candidates(["bsp"])[:1], target=300.0)
