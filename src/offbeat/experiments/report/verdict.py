"""The verdict on a comparison: each strategy against BSP, in numbers and in sentences.

    x BSP        BSP's seconds to the target over the strategy's; without a target, those for all steps
    bytes        the strategy's bytes to the target over BSP's
    Δ value      the strategy's last value minus BSP's; `better` has the sign that makes more better

A ratio is that of the means over the seeds that both have, as a reader divides two numbers of a table; its
spread is that of the ratios of two runs with the same seed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offbeat.core.units import percent
from offbeat.experiments.report.aggregate import RunGroup, Statistic, number_of
from offbeat.experiments.summary import Summary

BASELINE = "bsp"
EVEN = 0.05  # a difference in speed below this fraction is none
CLOSE = 0.002  # a difference in the metric below this fraction of BSP's value is none


@dataclass(frozen=True)
class Versus:
    """A group of runs against BSP with the same seeds."""

    speedup: Statistic
    nbytes: Statistic
    change: Statistic  # of the last value
    better: Statistic  # the change with the sign that makes more better

    def to_json(self) -> dict[str, Any]:
        """Return the statistics for the page."""
        return asdict(self)


def baseline_of(groups: list[RunGroup]) -> RunGroup | None:
    """Return the runs under BSP; None if there are none, or several kinds of them."""
    found = [group for group in groups if group.runs[0]["strategy"] == BASELINE]
    return found[0] if len(found) == 1 else None


def versus(group: RunGroup, base: RunGroup) -> Versus:
    """Compare a group's runs with those of BSP, seed by seed."""
    aimed = group.runs[0].get("target") is not None
    seconds, nbytes = ("seconds_to_target", "bytes_to_target") if aimed else ("seconds", "bytes_total")
    sign = 1 if group.runs[0].get("higher_is_better", True) else -1
    change = [ours - theirs for ours, theirs in _pairs(group, base, "value")]
    return Versus(
        speedup=_ratio([(theirs, ours) for ours, theirs in _pairs(group, base, seconds)]),
        nbytes=_ratio(_pairs(group, base, nbytes)),
        change=Statistic.of(change),
        better=Statistic.of(sign * each for each in change),
    )


def by_time_to_target(groups: list[RunGroup]) -> list[RunGroup]:
    """Sort groups: first to the target first, then those that some runs missed, then by their last value."""

    def key(group: RunGroup) -> tuple[bool, bool, float]:
        target = group.runs[0].get("target")
        name = "seconds" if target is None else "seconds_to_target"
        reached = group.statistic(name)
        sign = -1 if group.runs[0].get("higher_is_better", True) else 1
        value = group.statistic("value").mean
        rest = float("inf") if value is None else sign * value
        return (
            reached.runs == 0,
            reached.runs < len(group.runs),
            rest if reached.mean is None else reached.mean,
        )

    return sorted(groups, key=key)


def verdict(groups: list[RunGroup]) -> str | None:
    """Say which strategy is fastest, and what it costs; None if there is nothing to compare."""
    if len(groups) < 2:
        return None
    first = groups[0].runs[0]
    target = first.get("target")
    goal = f"reaches {target:g}" if target is not None else "takes all steps"
    base = baseline_of(groups)
    best = by_time_to_target(groups)[0]
    time = best.statistic("seconds" if target is None else "seconds_to_target")
    if time.mean is None:
        return f"No strategy reached {target:g}."
    if base is None:
        return f"{best.label} {goal} first, in {time.mean:.3g} s, {_seeds(best)}."
    rivals = [group for group in by_time_to_target(groups) if group is not base]
    against = {group.label: versus(group, base) for group in rivals}
    speedup = against[rivals[0].label].speedup.mean
    if not base.statistic("seconds" if target is None else "seconds_to_target").runs:
        return (
            f"{rivals[0].label} {goal} in {time.mean:.3g} s, which {base.label} never does; {_seeds(best)}."
        )
    if best is base or speedup is None or speedup < 1 + EVEN:
        return f"No strategy {goal} notably faster than {base.label}, {_seeds(base)}."
    return f"{best.label} {goal} {_gain(against[best.label], best, base)}, {_seeds(best)}."


def losses(groups: list[RunGroup]) -> dict[str, str]:
    """Say of each group that loses to BSP where it loses, and why; by label."""
    base = baseline_of(groups)
    notes: dict[str, str] = {}
    for group in groups:
        if base is None or group is base:
            continue
        target, against = group.runs[0].get("target"), versus(group, base)
        reached = group.statistic("seconds_to_target").runs
        base_reached = base.statistic("seconds_to_target").runs
        parts = []
        if target is not None and not reached and base_reached:
            value = group.statistic("value").mean
            ended = "" if value is None else f"; it ends at {value:.4g}"
            parts.append(f"does not reach {target:g} in {group.runs[0]['steps']} steps{ended}")
        elif against.speedup.mean is not None and against.speedup.mean < 1 - EVEN:
            parts.append(f"is slower than {base.label}: {_why_slower(group, base)}")
        if _is_worse(against, base):
            parts.append(f"ends {_difference(against, base)}")
        if parts:
            notes[group.label] = f"{group.label} {'; it '.join(parts)}."
    return notes


def run_result(run: Summary) -> str:
    """Say in a line how a run ended."""
    target, value = run["target"], run["value"]
    parts = [f"{run['metric']} {'unknown' if value is None else f'{value:.4f}'}"]
    if target is not None:
        reached = run["seconds_to_target"]
        parts.append(f"{target:g} never reached" if reached is None else f"{target:g} after {reached:.3g} s")
    return ", ".join([*parts, f"{run['seconds']:.3g} s in all"])


def _pairs(group: RunGroup, base: RunGroup, name: str) -> list[tuple[float, float]]:
    """Return a number of each two runs with the same seed, if both have it."""
    theirs = {run.get("seed"): number_of(run, name) for run in base.runs}
    pairs = [(number_of(run, name), theirs.get(run.get("seed"))) for run in group.runs]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _ratio(pairs: list[tuple[float, float]]) -> Statistic:
    """Return the ratio of the means, with the spread of the pairs' ratios; pairs with a zero are left out."""
    known = [(above, below) for above, below in pairs if above and below]
    each = Statistic.of(above / below for above, below in known)
    mean = sum(a for a, _ in known) / sum(b for _, b in known) if known else None
    return Statistic(mean, each.spread, each.runs)


def _two_digits(value: float) -> str:
    """Write a number with two digits, as the page does: 0.87, 5.1, 12, 120."""
    return f"{float(f'{value:.2g}'):g}"


def _gain(against: Versus, group: RunGroup, base: RunGroup) -> str:
    mean, spread = against.speedup.mean or 0.0, against.speedup.spread
    faster = f"{_two_digits(mean)}x faster than {base.label}"
    faster += f" (± {_two_digits(spread)})" if spread is not None else ""
    sent = f" with {percent(against.nbytes.mean)} of the bytes" if against.nbytes.mean is not None else ""
    return f"{faster}{sent}; {_value_change(against, group)}"


def _value_change(against: Versus, group: RunGroup) -> str:
    """Write the change of the metric: accuracy in points, others as they are."""
    metric, change = group.runs[0]["metric"], against.change
    if change.mean is None:
        return f"{metric} unknown"
    points = metric == "accuracy"
    scale, unit = (100, " points") if points else (1, "")
    spread = "" if change.spread is None else f" ± {_two_digits(scale * change.spread)}"
    sign = "-" if change.mean < 0 else "+"
    return f"{metric} {sign}{_two_digits(scale * abs(change.mean))}{spread}{unit}"


def _is_worse(against: Versus, base: RunGroup) -> bool:
    """Tell whether a group's last value is worse than BSP's by more than the spread of the seeds."""
    value = base.statistic("value").mean
    if against.better.mean is None or value is None:
        return False
    return -against.better.mean > max(CLOSE * abs(value), against.better.spread or 0.0)


def _difference(against: Versus, base: RunGroup) -> str:
    assert against.better.mean is not None
    if base.runs[0]["metric"] == "accuracy":
        return f"{100 * -against.better.mean:.2g} points below {base.label}"
    return f"{-against.better.mean:.2g} worse than {base.label}"


def _why_slower(group: RunGroup, base: RunGroup) -> str:
    """Split a longer time into more steps and longer steps, and name the waiting."""
    steps, base_steps = _steps_to_target(group), _steps_to_target(base)
    step_s, base_step_s = _seconds_per_step(group), _seconds_per_step(base)
    reasons = []
    if steps and base_steps and steps > (1 + EVEN) * base_steps:
        reasons.append(f"it needs {steps / base_steps:.1f}x the steps")
    if step_s and base_step_s and step_s > (1 + EVEN) * base_step_s:
        waiting = group.waiting.mean
        text = f"a step takes {step_s / base_step_s:.1f}x as long"
        reasons.append(text if waiting is None else f"{text} (waiting {percent(waiting)} of the time)")
    return ", and ".join(reasons) or "the seeds differ"


def _steps_to_target(group: RunGroup) -> float | None:
    reached = [
        point["step"]
        for run in group.runs
        for point in run["history"]
        if run.get("seconds_to_target") is not None and point["seconds"] == run["seconds_to_target"]
    ]
    return Statistic.of(reached).mean


def _seconds_per_step(group: RunGroup) -> float | None:
    return Statistic.of(run["seconds"] / run["steps"] if run["steps"] else None for run in group.runs).mean


def _seeds(group: RunGroup) -> str:
    return "one seed" if len(group.runs) == 1 else f"{len(group.runs)} seeds"
