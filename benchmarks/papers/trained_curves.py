"""Curves of the benchmark trained: one picture a strategy, with a panel for each model it was trained on.

A line is the mean of the seeds at each evaluation; its band reaches from the lowest to the highest. An
accuracy is drawn as its error, on a logarithmic axis: both the way down and the last tenths can be seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from benchmarks.papers.runs import Cache
from benchmarks.papers.trained_runs import CONTENDERS, MODELS, MOST_SEEDS, Contender, run_of

WIDTH, HEIGHT = 460, 230  # of a panel; narrow, to be read on a phone
LEFT, RIGHT, LINE = 44, 10, 18
COLORS = ("#777", "#2a6fb0", "#c8501e", "#2e8b57", "#8e4bb0", "#b8860b", "#c2386f", "#3aa3a3", "#665a48")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .title { font-weight: 600; font-size: 13px }
.axis { stroke: #bbb; stroke-width: 1 } .line { fill: none; stroke-width: 2 } .band { opacity: 0.18 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .axis { stroke: #555 } }
"""


class Point(NamedTuple):
    """The seeds' values at one evaluation."""

    epoch: float
    low: float
    mean: float
    high: float


class Curve(NamedTuple):
    """A contender's points."""

    name: str
    seeds: int
    points: list[Point]


class Axis(NamedTuple):
    """A vertical axis, from the lowest to the highest value shown."""

    low: float
    high: float
    log: bool

    def height(self, value: float) -> float:
        """Return the height of a value, 0 to 1; what lies outside is on the edge."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, max(value, self.low)))
        return min(1.0, (at - low) / (high - low))

    @property
    def ticks(self) -> list[float]:
        """Round values to label."""
        powers = [10.0**power for power in range(-3, 6)]
        if self.log:
            round_values = [digit * power for power in powers for digit in (1, 2, 3, 5, 7)]
        else:
            step = next(d * p for p in powers for d in (1, 2, 5) if (self.high - self.low) / (d * p) <= 6)
            first = math.ceil(self.low / step)
            round_values = [step * number for number in range(first, first + 7)]
        return [value for value in round_values if self.low <= value <= self.high]


def curve_of(model: str, name: str, contender: Contender, cache: Cache) -> Curve | None:
    """Return a contender's curve with all of its seeds; None if it has none."""
    of = MODELS[model]
    outcomes = [
        outcome for seed in range(MOST_SEEDS) if (outcome := cache.get(run_of(model, contender, seed)))
    ]
    points = []
    for evaluations in zip(*(outcome["history"] for outcome in outcomes), strict=True):
        values = [shown(model, evaluation["value"]) for evaluation in evaluations]
        if all(map(math.isfinite, values)):
            epoch = evaluations[0]["step"] * of.epochs / of.steps
            points.append(Point(epoch, min(values), statistics.mean(values), max(values)))
    return Curve(name, len(outcomes), points) if points else None


def shown(model: str, value: float | None) -> float:
    """Return what is drawn of a score: an accuracy's error in percent, other scores as they are."""
    if value is None:
        return math.nan
    return 100 * (1 - value) if is_accuracy(model) else value


def is_accuracy(model: str) -> bool:
    return MODELS[model].score.startswith("accuracy")


def axis_of(model: str, curves: Sequence[Curve]) -> Axis:
    """Return an axis that has room for every point."""
    log = "BLEU" not in MODELS[model].score
    low = min(point.low for curve in curves for point in curve.points)
    high = max(point.high for curve in curves for point in curve.points)
    return Axis(max(low, 0.01) / 1.1, max(high, 0.02) * 1.1, log) if log else Axis(0, high * 1.05, log)


def ink(number: int) -> str:
    """Return color and dashes of a line: the colors once more, dashed, when they are used up."""
    again, color = divmod(number, len(COLORS))
    return f'stroke="{COLORS[color]}"' + ' stroke-dasharray="5 3"' * again


def panel(model: str, curves: Sequence[Curve], top: int) -> tuple[list[str], int]:
    """Draw the curves of one model; return the parts, and where the next panel begins."""
    axis, epochs = axis_of(model, curves), max(curve.points[-1].epoch for curve in curves)
    what = "error in percent" if is_accuracy(model) else MODELS[model].score
    parts = [
        f'<text class="title" x="4" y="{top + 14}">{model} on {MODELS[model].task}: {escape(what)}</text>'
    ]
    for number, curve in enumerate(curves):
        y = top + (number + 1) * LINE + 14
        seeds = "1 seed" if curve.seeds == 1 else f"{curve.seeds} seeds"
        parts.append(f'<path class="line" {ink(number)} d="M{LEFT} {y - 5}h20"/>')
        parts.append(f'<text x="{LEFT + 26}" y="{y}">{escape(curve.name)}, {seeds}</text>')
    top += (len(curves) + 2) * LINE
    floor, right = top + HEIGHT - 36, WIDTH - RIGHT

    def at(epoch: float, value: float) -> str:
        x = LEFT + epoch / epochs * (right - LEFT)
        return f"{x:.1f} {floor - axis.height(value) * (floor - top):.1f}"

    for tick in axis.ticks:
        y_of = at(0, tick).split()[1]
        parts.append(f'<path class="axis" d="M{LEFT} {y_of}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(y_of) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number, curve in enumerate(curves):
        up = [at(point.epoch, point.low) for point in curve.points]
        down = [at(point.epoch, point.high) for point in reversed(curve.points)]
        mean = "L".join(at(point.epoch, point.mean) for point in curve.points)
        if curve.seeds > 1:
            parts.append(
                f'<path class="band" fill="{COLORS[number % len(COLORS)]}" d="M{"L".join(up + down)}Z"/>'
            )
        parts.append(f'<path class="line" {ink(number)} d="M{mean}"/>')
    parts.append(f'<text x="{LEFT}" y="{floor + 18}">0</text>')
    parts.append(f'<text x="{right}" y="{floor + 18}" text-anchor="end">{epochs:g} epochs</text>')
    return parts, top + HEIGHT


def picture(strategy: str, cache: Cache) -> str:
    """Return the SVG of a strategy's curves beside BSP's; empty if it has no run."""
    parts: list[str] = []
    top = 0
    for model in MODELS:
        chosen = {name: of for name, of in CONTENDERS.items() if name == "BSP" or of.strategy == strategy}
        found = [curve_of(model, name, contender, cache) for name, contender in chosen.items()]
        curves = [curve for curve in found if curve]
        if any(CONTENDERS[curve.name].strategy == strategy for curve in curves):
            drawn, top = panel(model, curves, top)
            parts += drawn
    if not parts:
        return ""
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
