"""How figures are made from the outcomes of runs: means over the seeds, with lowest and highest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.papers.claims import Outcome, Outcomes


def spread(values: Sequence[float], digits: int) -> str:
    """The mean; of several seeds also the lowest and the highest."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def score(outcome: Outcome) -> float:
    """As papers print it: accuracies in per cent, BLEU and perplexity as they are."""
    value = float("nan") if outcome["value"] is None else float(outcome["value"])
    return value * (100 if outcome["metric"] == "accuracy" else 1)


def against(outcomes: Outcomes, name: str, other: str = "bsp") -> str:
    """A contender's score beside the other's, seed by seed."""
    ours, theirs = ([score(outcome) for outcome in outcomes[who]] for who in (name, other))
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    seeds = f"; {len(ours)} seeds" if len(ours) > 1 else "; 1 seed"
    return (
        f"{spread(ours, 2)} vs {spread(theirs, 2)} ({other}): {statistics.mean(differences):+.2f}"
        f"{'' if len(ours) == 1 else f' ({min(differences):+.2f} – {max(differences):+.2f})'}{seeds}"
    )


def sooner(outcomes: Outcomes, name: str, other: str = "bsp") -> str:
    """By how much sooner a contender was where both came to, at the same evaluations; seed by seed."""
    ratios = []
    for mine, theirs in zip(outcomes[name], outcomes[other], strict=True):
        if mine["best"] is None or theirs["best"] is None:  # not a number at any time
            return "never"
        sign = 1 if mine["higher_is_better"] else -1
        target = min(sign * mine["best"], sign * theirs["best"])
        at_s = [
            next(point["seconds"] for point in run["history"] if sign * point["value"] >= target)
            for run in (mine, theirs)
        ]
        ratios.append(at_s[1] / at_s[0])
    return f"{spread(ratios, 2)}×"


def finished(outcomes: Outcomes, name: str, other: str = "bsp") -> str:
    """By how much sooner a contender had done as many steps."""
    pairs = zip(outcomes[name], outcomes[other], strict=True)
    return f"{spread([theirs['seconds'] / mine['seconds'] for mine, theirs in pairs], 2)}×"


def step_ratio(outcomes: Outcomes, name: str, other: str) -> float:
    """Samples a second of the one to those of the other, where all workers go in step."""
    return float(outcomes[other][0]["late_step_s"] / outcomes[name][0]["late_step_s"])


def rate_ratio(outcomes: Outcomes, name: str, other: str) -> float:
    """The same, where each worker has a pace of its own."""
    return float(outcomes[name][0]["rate"] / outcomes[other][0]["rate"])


def lssr(outcomes: Outcomes, name: str) -> str:
    return spread([outcome["lssr"] for outcome in outcomes[name]], 3)


def byte_ratio(outcomes: Outcomes, name: str, other: str) -> str:
    pairs = zip(outcomes[name], outcomes[other], strict=True)
    return spread([mine["bytes_sent"] / theirs["bytes_sent"] for mine, theirs in pairs], 2)


def stalest(outcomes: Outcomes, name: str) -> int:
    return max(worker["staleness_max"] for outcome in outcomes[name] for worker in outcome["per_worker"])


def busy(outcomes: Outcomes, name: str) -> str:
    """The share of their training time in which workers computed."""
    return spread(
        [
            sum(worker["compute_s"] for worker in outcome["per_worker"])
            / sum(worker["compute_s"] + worker["wait_s"] for worker in outcome["per_worker"])
            for outcome in outcomes[name]
        ],
        2,
    )
