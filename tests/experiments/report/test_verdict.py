"""The verdict: against BSP with the same seed, in a sentence that holds, with the reason where BSP wins."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.experiments.report.aggregate import RunGroup, Statistic, grouped
from offbeat.experiments.report.verdict import (
    baseline_of,
    by_time_to_target,
    losses,
    run_result,
    verdict,
    versus,
)


def run(strategy: str, seed: int = 0, **changed: Any) -> dict[str, Any]:
    known = {
        "strategy": strategy, "settings": {}, "task": "digits", "metric": "accuracy", "workers": 1,
        "seed": seed,
        "steps": 100, "sync_steps": 100, "seconds": 20.0, "seconds_to_target": 10.0, "bytes_to_target": 1000,
        "value": 0.97, "best": 0.97, "bytes_sent": 2000, "target": 0.95, "higher_is_better": True,
        "per_worker": [{"compute_s": 1.0, "wait_s": 1.0}], "history": [{"step": 50, "seconds": 10.0}],
    }  # fmt: skip
    return {**known, **changed}


def groups(*runs: dict[str, Any]) -> list[RunGroup]:
    return grouped(list(runs))


FAST = {"seconds": 5.0, "seconds_to_target": 2.0, "bytes_to_target": 100, "value": 0.978}


def test_the_sentence_names_speed_bytes_accuracy_and_seeds() -> None:
    assert verdict(groups(run("bsp"), run("local_sgd", **FAST))) == (
        "local_sgd reaches 0.95 5x faster than bsp with 10% of the bytes; accuracy +0.8 points, one seed."
    )


def test_a_ratio_is_that_of_the_means_over_the_seeds_that_both_have() -> None:
    base, ours = groups(
        run("bsp", 0, seconds_to_target=10.0),
        run("bsp", 1, seconds_to_target=40.0),
        run("local_sgd", 1, seconds_to_target=10.0),
        run("local_sgd", 0, seconds_to_target=5.0),
        run("local_sgd", 2, seconds_to_target=5.0),
    )
    assert versus(ours, base).speedup == Statistic(50 / 15, pytest.approx(2**0.5), 2)
    sentence = verdict([base, ours])
    assert sentence is not None
    assert "3.3x faster than bsp (± 1.4)" in sentence
    assert sentence.endswith("3 seeds.")


def test_where_bsp_wins_no_strategy_is_praised_and_the_reason_is_given() -> None:
    slow = run(
        "ssp", seconds=60.0, seconds_to_target=45.0, value=0.95, history=[{"step": 75, "seconds": 45.0}]
    )
    compared = groups(run("bsp"), slow)
    assert verdict(compared) == "No strategy reaches 0.95 notably faster than bsp, one seed."
    assert losses(compared) == {
        "ssp": "ssp is slower than bsp: it needs 1.5x the steps, and a step takes 3.0x as long "
        "(waiting 50% of the time); it ends 2 points below bsp."
    }


def test_a_target_that_is_missed_is_a_loss() -> None:
    missed = run("asp", seconds_to_target=None, bytes_to_target=None, value=0.9)
    compared = groups(run("bsp"), missed)
    assert losses(compared)["asp"] == (
        "asp does not reach 0.95 in 100 steps; it ends at 0.9; it ends 7 points below bsp."
    )
    assert verdict(groups({**missed, "strategy": "bsp"}, missed)) == "No strategy reached 0.95."
    assert verdict(groups({**missed, "strategy": "bsp"}, run("ssp"))) == (
        "ssp reaches 0.95 in 10 s, which bsp never does; one seed."
    )


def test_lower_may_be_better() -> None:
    of = {"metric": "loss", "higher_is_better": False}
    compared = groups(run("bsp", value=2.0, **of), run("local_sgd", value=1.5, **of))
    against = versus(compared[1], compared[0])
    assert (against.change.mean, against.better.mean) == (-0.5, 0.5)
    assert losses(compared) == {}
    assert losses(groups(run("bsp", value=1.5, **of), run("ssp", value=2.0, **of)))["ssp"] == (
        "ssp ends 0.5 worse than bsp."
    )


def test_without_a_target_all_steps_count_and_without_bsp_only_the_first() -> None:
    free = {"target": None, "seconds_to_target": None, "bytes_to_target": None}
    compared = groups(run("bsp", **free), run("local_sgd", **{**free, "seconds": 10.0, "bytes_sent": 500}))
    sentence = verdict(compared)
    assert sentence is not None
    assert sentence.startswith("local_sgd takes all steps 2x faster than bsp with 25% of the bytes")
    assert verdict(groups(run("ssp"), run("asp", seconds_to_target=4.0))) == (
        "asp reaches 0.95 first, in 4 s, one seed."
    )
    assert verdict(groups(run("bsp"))) is None
    assert baseline_of(groups(run("ssp"))) is None


def test_rows_are_sorted_by_the_time_to_the_target() -> None:
    never = run("asp", seconds_to_target=None)
    partly = [run("ssp", 0, seconds_to_target=1.0), run("ssp", 1, seconds_to_target=None)]
    compared = groups(never, *partly, run("bsp"), run("local_sgd", **FAST))
    assert [group.label for group in by_time_to_target(compared)] == ["local_sgd", "bsp", "ssp", "asp"]


def test_zero_bytes_are_not_compared() -> None:
    compared = groups(run("bsp"), run("ssp", **{**FAST, "bytes_to_target": 0}))
    sentence = verdict(compared)
    assert sentence is not None
    assert "of the bytes" not in sentence


def test_a_run_ends_with_a_line() -> None:
    assert run_result(run("bsp")) == "accuracy 0.9700, 0.95 after 10 s, 20 s in all"
    assert "0.95 never reached" in run_result(run("bsp", seconds_to_target=None))
