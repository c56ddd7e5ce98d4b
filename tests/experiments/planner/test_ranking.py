"""The ranking of a plan, and what it says of risks, from histories made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from offbeat import ASP, BSP, SSP, LocalSGD, Strategy
from offbeat.errors import SettingError
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Evaluation
from offbeat.experiments.planner.ranking import Outcome, comparison, ranked, risks, verdict
from offbeat.experiments.planner.search import target_of
from offbeat.experiments.planner.trials import Trial
from offbeat.experiments.tasks import task

DIGITS = task("digits")
QUADRATIC = task("quadratic")  # lower is better
TARGET = 0.9


def trial(values: Sequence[float], second: float = 1.0, kind: Any = DIGITS, **more: Any) -> Trial:
    """Evaluations every 10 steps, each of them `second` seconds and 100 bytes after the one before."""
    job = Job(task=kind, strategy=BSP(), workers=4, target=TARGET)
    points = [Evaluation(10 * n, second * n, 0.0, value, 100 * n) for n, value in enumerate(values, 1)]
    return Trial(job, tuple(points), second * len(values), **more)


def outcome(*trials: Trial, strategy: Strategy[Any] = BSP()) -> Outcome:  # noqa: B008
    return Outcome(strategy, trials)


BASE = outcome(trial([0.5, 0.8, 0.9, 0.95, 0.95, 0.95]))


def test_figures_are_those_of_the_point_at_which_the_target_was_reached() -> None:
    both = outcome(trial([0.5, 0.95, 0.8]), trial([0.5, 0.6, 0.7, 0.9]))
    part = 0.4 / 0.45  # of the way from 0.5 to 0.95
    assert both.seconds.mean == pytest.approx((1 + part + 4) / 2)
    assert both.nbytes.mean == pytest.approx(100 * (1 + part + 4) / 2)
    assert both.steps.mean == pytest.approx(10 * (1 + part + 4) / 2)
    assert both.step_seconds.mean == pytest.approx(0.1), "apart from the steps"
    assert both.value.mean == pytest.approx(0.85)
    assert both.succeeds
    assert both.failure == ""


def test_who_is_sooner_is_first_and_who_fails_is_last() -> None:
    slow = outcome(trial([0.5, 0.9], second=3.0))
    fast = outcome(trial([0.5, 0.6, 0.9]))
    half = outcome(trial([0.95]), trial([0.5]))
    never = outcome(trial([0.5, 0.65]))
    stopped = outcome(trial([0.7], stopped=True))
    worse = outcome(trial([0.6], stopped=True))
    failed = outcome(trial([], problem="stuck at 0 s: nobody"))
    diverged = outcome(trial([math.nan]))
    everything = [diverged, failed, worse, stopped, never, half, slow, fast]
    assert ranked(everything) == [fast, slow, half, stopped, never, worse, diverged, failed]
    assert never.failure == "never in 2 s"
    assert half.failure == "never in 1 s"
    assert stopped.failure == "stopped at 1 s"
    assert failed.failure == "failed"
    assert risks(failed, BASE) == ["stuck at 0 s"]


def test_one_with_fewer_seeds_is_compared_over_those_that_both_have() -> None:
    """Its one seed is a slow one for everybody: by means over different seeds it would be last."""
    leader = outcome(trial([0.5, 0.9], second=4.0), *[trial([0.5, 0.9])] * 3, strategy=LocalSGD())
    out = outcome(trial([0.5, 0.9], second=4.4))
    slow = outcome(*[trial([0.5, 0.9], second=second) for second in (4.9, 1.2, 1.2, 1.2)])
    assert ranked([slow, out, leader]) == [leader, out, slow]
    how = comparison(out, leader)
    assert how is not None and (how.ratio, how.seeds) == (pytest.approx(1.1), 1)


def test_what_cannot_be_told_apart_is_said_to_be_too_close_to_call() -> None:
    def of(*seconds: float, strategy: Strategy[Any]) -> Outcome:
        return outcome(*[trial([0.5, 0.9], second=second) for second in seconds], strategy=strategy)

    leader = of(1.0, 1.2, 0.9, strategy=LocalSGD())
    near = of(1.1, 1.1, 1.0, strategy=BSP())
    far = of(1.5, 1.81, 1.34, strategy=LocalSGD(period=2))
    said = verdict(ranked([far, near, leader]))
    assert said.startswith("too close to call over 3 seeds: local_sgd is first, but not surely; bsp 1.04x (")
    assert "period=2" not in said
    assert verdict([far, leader]).startswith("local_sgd is the fastest over 3 seeds: the next, local_sgd p")
    assert verdict([leader]) == "local_sgd alone reached the target with every seed"
    assert "over 1 seed:" in verdict([of(1.0, strategy=BSP()), of(1.4, strategy=LocalSGD())])
    assert verdict([outcome(trial([0.5]))]) == ""


def test_one_that_sent_nothing_is_not_first() -> None:
    silent = outcome(trial([0.8, 0.95, 0.95, 0.92], exchanged_at=40), strategy=LocalSGD(period=32))
    spoken = outcome(trial([0.7, 0.85, 0.91]), strategy=LocalSGD())
    assert ranked([silent, spoken]) == [spoken, silent]
    assert outcome(trial([0.8, 0.91], exchanged_at=None)).failure == "never in 2 s"


def test_equals_keep_their_order() -> None:
    one, two = outcome(trial([0.9])), outcome(trial([0.9]), strategy=LocalSGD())
    assert ranked([one, two])[0] is one
    assert ranked([two, one])[0] is two


def test_one_that_repeats_is_put_before_one_at_a_server_that_is_hardly_sooner() -> None:
    served = outcome(trial([0.5, 0.9], second=1.0), strategy=ASP())
    close = outcome(trial([0.5, 0.9], second=1.09), strategy=LocalSGD())
    closer = outcome(trial([0.5, 0.9], second=1.05), strategy=SSP())
    far = outcome(trial([0.5, 0.9], second=1.11), strategy=LocalSGD(period=4))
    assert ranked([far, close, closer, served]) == [close, served, closer, far]
    assert ranked([far, closer, served]) == [served, closer, far]
    assert risks(served, BASE) == ["no two runs alike"]
    assert risks(close, BASE) == []


def test_where_nobody_reached_the_target_nobody_is_put_first() -> None:
    served = outcome(trial([0.7]), strategy=ASP())
    other = outcome(trial([0.6]), strategy=LocalSGD())
    assert ranked([other, served]) == [served, other]
    assert ranked([]) == []


def test_of_losses_the_lower_one_is_better() -> None:
    low = outcome(trial([3.0, 2.0], kind=QUADRATIC))
    high = outcome(trial([4.0, 3.0], kind=QUADRATIC))
    assert ranked([high, low]) == [low, high]
    assert risks(high, low) == ["1 behind bsp"]
    assert risks(low, high) == []
    assert target_of(QUADRATIC, low.trials) == pytest.approx(2.01)
    assert target_of(DIGITS, BASE.trials) == pytest.approx(0.95 * 0.995)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (outcome(trial([0.5, 0.8, 0.9, 0.95])), []),
        (outcome(trial([0.5, 0.8, 0.9, 0.899, 0.95])), []),  # noise, which fine evaluations are full of
        (outcome(trial([0.5, 0.8, 0.9, 0.85, 0.945])), ["slips back"]),
        (outcome(trial([0.5, 0.8, 0.9, 0.92])), ["0.03 behind bsp"]),
        (outcome(trial([0.5, 0.8, 0.9, 0.942])), []),
        (outcome(trial([0.5, 0.8, 0.91], staleness=4)), ["stale by 4"]),
        (outcome(trial([0.5, 0.9]), trial([0.5, 0.9], second=1.1)), []),
        (outcome(trial([0.5, 0.9]), trial([0.5, 0.9], second=1.5)), ["seeds ±28%"]),
        (outcome(trial([0.5, 0.9]), trial([0.5, 0.8])), ["reached by 1 of 2 seeds"]),
    ],
)
def test_risks_are_what_was_seen(given: Outcome, told: list[str]) -> None:
    assert risks(given, BASE) == told


def test_without_a_result_of_bsp_there_is_no_target() -> None:
    for bad in (trial([math.nan]), trial([]), trial([0.9], problem="stuck at 3 s")):
        with pytest.raises(SettingError, match="so give a target"):
            target_of(DIGITS, [bad])
