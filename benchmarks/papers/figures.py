"""Figures from the outcomes of runs: means over the seeds, with lowest and highest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from benchmarks.papers.claims import Outcome, Outcomes
from benchmarks.support.tables import spread


def score(outcome: Outcome, of: Literal["value", "best"] = "value") -> float:
    """Return the score as papers print it: accuracies in percent, BLEU and perplexity unchanged.

    It is that of the last evaluation, or of the best.
    """
    value = float("nan") if outcome[of] is None else float(outcome[of])
    return value * (100 if outcome["metric"] == "accuracy" else 1)


# the 97.5% quantiles of Student's t, with 1, 2, … degrees of freedom
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95% interval of a mean, by Student's t; None: one value has none."""
    if len(values) < 2:
        return None
    return STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def compare_scores(outcomes: Outcomes, name: str, other: str = "bsp") -> str:
    """Compare the scores of two contenders, seed by seed."""
    ours, theirs = ([score(outcome) for outcome in outcomes[which]] for which in (name, other))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    seeds = f"; {len(ours)} seeds" if len(ours) > 1 else "; 1 seed"
    return (
        f"{spread(ours, 2)} vs {spread(theirs, 2)} ({other}): {statistics.mean(differences):+.2f}"
        f"{'' if len(ours) == 1 else f' ({min(differences):+.2f} – {max(differences):+.2f})'}{seeds}"
    )


def speedup_to_score(outcomes: Outcomes, name: str, other: str = "bsp") -> str:
    """Return how many times sooner a contender reached the best score that both reached, seed by seed."""
    ratios = []
    for mine, theirs in zip(outcomes[name], outcomes[other], strict=True):
        if mine["best"] is None or theirs["best"] is None:  # every score was NaN
            return "never"
        sign = 1 if mine["higher_is_better"] else -1
        target = min(sign * mine["best"], sign * theirs["best"])
        seconds = [
            next(point["seconds"] for point in run["history"] if sign * point["value"] >= target)
            for run in (mine, theirs)
        ]
        ratios.append(seconds[1] / seconds[0])
    return f"{spread(ratios, 2)}x"


def speedup_for_steps(outcomes: Outcomes, name: str, other: str = "bsp") -> str:
    """Return how many times sooner a contender finished the same number of steps."""
    pairs = zip(outcomes[name], outcomes[other], strict=True)
    return f"{spread([theirs['seconds'] / mine['seconds'] for mine, theirs in pairs], 2)}x"


def step_ratio(outcomes: Outcomes, name: str, other: str) -> float:
    """Return the ratio of samples per second where all workers take the same number of steps."""
    return float(outcomes[other][0]["late_step_s"] / outcomes[name][0]["late_step_s"])


def rate_ratio(outcomes: Outcomes, name: str, other: str) -> float:
    """Return the ratio of samples per second where workers do not wait for each other."""
    return float(outcomes[name][0]["rate"] / outcomes[other][0]["rate"])


def lssr(outcomes: Outcomes, name: str) -> str:
    """Format the fraction of local steps (LSSR)."""
    return spread([outcome["lssr"] for outcome in outcomes[name]], 3)


def byte_ratio(outcomes: Outcomes, name: str, other: str) -> str:
    """Format the ratio of bytes sent."""
    pairs = zip(outcomes[name], outcomes[other], strict=True)
    return spread([mine["bytes_sent"] / theirs["bytes_sent"] for mine, theirs in pairs], 2)


def max_staleness(outcomes: Outcomes, name: str) -> int:
    """Return the largest staleness of any worker."""
    return max(worker["staleness_max"] for outcome in outcomes[name] for worker in outcome["per_worker"])


def compute_fraction(outcomes: Outcomes, name: str) -> str:
    """Format the fraction of the training time in which workers computed."""
    return spread(
        [
            sum(worker["compute_s"] for worker in outcome["per_worker"])
            / sum(worker["compute_s"] + worker["wait_s"] for worker in outcome["per_worker"])
            for outcome in outcomes[name]
        ],
        2,
    )
