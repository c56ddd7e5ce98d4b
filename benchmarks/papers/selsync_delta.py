"""Which δ gives SelSync the paper's LSSR here, and how accurate is it then?

    python -m benchmarks run selsync_delta --data FOLDER [--tasks digits lenet5] [--jobs 2] [--minutes 10]

Eight workers in virtual time, SelDP, a learning rate that rises and then falls to 0, three seeds that chose
no setting: the digits' CNN for 20 epochs, LeNet-5 on MNIST for 2. "Equal samples": SelSync and BSP make the
same number of steps. "Twice": SelSync makes two times as many, BSP does not; the authors gave SelSync 1.9 and
6.7 times BSP's iterations. Differences are in points, between runs of one seed. Below the table, the δ at
which the paper's values of LSSR would lie, by interpolation. The last row of a task has DefDP instead of
SelDP, at a δ where workers seldom average.

Finished runs are kept in `--out`; those that are missing are executed, and none is started after `--minutes`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

from benchmarks.catalog import RESULTS
from benchmarks.papers.claims import Outcome, Run
from benchmarks.papers.figures import score
from benchmarks.papers.runs import Cache, perform_all
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table, spread

SEEDS = (30, 31, 32)
PAPER = (0.725, 0.829, 0.912)  # LSSR with δ 0.3: Transformer, ResNet101, VGG11
LONGER = 2
SELDOM = 1.0  # the δ at which the orders of data are compared


@dataclass(frozen=True)
class Case:
    """A task and its δ."""

    bsp: Run
    deltas: tuple[float, ...]


DIGITS = Run(
    task="digits",
    model="cnn",
    strategy="bsp",
    cluster="lan-1g",
    workers=8,
    steps=220,
    batch_size=16,
    lr=0.05,
    evaluations=1,
    schedule="cosine",
)
CASES = {
    "digits": Case(DIGITS, (0.1, 0.3, 0.5, 0.7, 1.0, 1.5)),
    "lenet5": Case(
        replace(DIGITS, task="mnist", model="lenet5", steps=468, batch_size=32), (0.1, 0.3, 0.5, 0.7, 1.0)
    ),
}


def with_delta(bsp: Run, delta: float, length: int = 1, order: str = "seldp") -> Run:
    """Return the run with SelSync."""
    steps = length * bsp.steps
    return replace(bsp, strategy="selsync", settings=(f"delta={delta:g}",), order=order, steps=steps)


def seeds_of(run: Run) -> list[Run]:
    """Return the run with each seed."""
    return [replace(run, seed=seed) for seed in SEEDS]


def runs_of(case: Case) -> list[Run]:
    """Return all runs of a task, those of one seed together."""
    plain = [case.bsp, *(with_delta(case.bsp, delta) for delta in case.deltas)]
    more = [with_delta(case.bsp, delta, LONGER) for delta in case.deltas]
    other = with_delta(case.bsp, SELDOM, order="defdp")
    return [replace(run, seed=seed) for seed in SEEDS for run in (*plain, *more, other)]


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    cache = Cache(options.out, str(date.today()))
    if not options.table:
        runs = [run for name in options.tasks for run in runs_of(CASES[name])]
        for run in perform_all(runs, cache, options.data, "cpu", options.jobs, options.minutes):
            print(f"not done: {run.title}", flush=True)
    write_table(cache)


def write_table(cache: Cache) -> None:
    """Write the rows of all runs that are there."""
    columns = ["task", "δ", "order", "LSSR", "bytes, of BSP's", "equal samples", "Δ BSP", "twice", "Δ BSP"]
    table = Table("selsync_delta", __doc__ or "", columns)
    for name, case in CASES.items():
        bsp = found(cache, case.bsp)
        table.row(name, "BSP", "shuffled", "0", "1", show(list(bsp.values())), "", "", "")
        curve = []
        for delta in case.deltas:
            equal = found(cache, with_delta(case.bsp, delta))
            table.row(
                name,
                f"{delta:g}",
                "SelDP",
                *figures(bsp, equal),
                *compared(bsp, found(cache, with_delta(case.bsp, delta, LONGER))),
            )
            if equal:
                curve.append((delta, statistics.mean(outcome["lssr"] for outcome in equal.values())))
        other = found(cache, with_delta(case.bsp, SELDOM, order="defdp"))
        table.row(name, f"{SELDOM:g}", "DefDP", *figures(bsp, other), "", "")
        for lssr in PAPER:
            table.note(f"{name}: LSSR {lssr} at {delta_for(curve, lssr)}")
    table.write()


def found(cache: Cache, run: Run) -> dict[int, Outcome]:
    """Return the outcomes that are there, by seed."""
    return {one.seed: outcome for one in seeds_of(run) if (outcome := cache.get(one))}


def figures(bsp: dict[int, Outcome], ours: dict[int, Outcome]) -> tuple[str, ...]:
    """Return LSSR, bytes and accuracy."""
    both = [seed for seed in ours if seed in bsp]
    if not both:
        return "", "", "", ""
    sent = [ours[seed]["bytes_sent"] / bsp[seed]["bytes_sent"] for seed in both]
    lssr = spread([outcome["lssr"] for outcome in ours.values()], 3)
    return lssr, f"{statistics.mean(sent):.2f}", *compared(bsp, ours)


def compared(bsp: dict[int, Outcome], ours: dict[int, Outcome]) -> tuple[str, str]:
    """Return accuracies, and their differences from BSP's."""
    differences = [score(ours[seed]) - score(bsp[seed]) for seed in ours if seed in bsp]
    if not differences:
        return "", ""
    return show(list(ours.values())), spread(differences, 2)


def show(outcomes: list[Outcome]) -> str:
    return spread([score(outcome) for outcome in outcomes], 2) if outcomes else ""


def delta_for(curve: list[tuple[float, float]], lssr: float) -> str:
    """Return the δ at which a curve of (δ, LSSR) passes an LSSR, in words."""
    for (low, before), (high, after) in pairwise(curve):
        if before <= lssr <= after and before < after:
            return f"δ {low + (high - low) * (lssr - before) / (after - before):.2f}"
    return "no δ that was tried"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and exit with an error if something is missing."""
    parser = benchmark_parser("selsync_delta", __doc__)
    add_data_option(parser)
    parser.add_argument("--tasks", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--out", type=Path, default=RESULTS / "raw" / "selsync_delta", help="finished runs")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of cached runs")
    options = parser.parse_args(arguments)
    if not options.table:
        require_data(parser, options)
    return options
