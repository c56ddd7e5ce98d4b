"""Trained to the end, is each method as accurate as BSP?

    python -m benchmarks run trained --data FOLDER --device cuda [--minutes 20] [--models resnet18]

The papers' models on real data, with the usual augmentation and a learning rate that rises and then falls to
0, all methods for as many samples as BSP, or for twice as many: the authors of SelSync gave it 1.9 and 6.7
times BSP's iterations. "BSP, twice as long" says whether BSP had converged.

Finished runs are kept in `--out`, by default among the raw results. Runs that are not there yet are executed,
seed by seed, in the order of `--only`; none is started after `--minutes`. Then the table of all runs is
written: it can grow over days. `--quick` tries six tiny steps and an evaluation of every run, to see on a new
machine that all of them work. Several `--jobs` on one GPU need NVIDIA's MPS (`nvidia-cuda-mps-control -d`):
without it processes take turns on the GPU, and hold each other up. Settings were not chosen on these seeds.
`--pages` then puts each strategy's rows, and a picture of its curves, on its page in docs/strategies.

"score" is that of the last evaluation, "best" that of the best of a run's 15, as with early stopping. Claims
go by the last one, as long as BSP does not overfit: so everywhere but on the Transformer, where BSP is best
at evaluation 7 and then gets worse. There claims go by the best: the last would credit a method that learns
more slowly with overfitting less. Scores are of the test split, so "best" is a little too good, for all.

Δ BSP is the mean of the differences between runs of the same seed, BSP's with its usual number of samples;
after ± half of the mean's 95% interval (Student's t: wide with three seeds, useless with two), in brackets
the lowest and the highest difference.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Literal

from benchmarks.catalog import RESULTS
from benchmarks.papers.claims import Outcome, Run
from benchmarks.papers.figures import half_interval, score
from benchmarks.papers.runs import Cache, perform_all
from benchmarks.papers.trained_pages import write_pages
from benchmarks.papers.trained_runs import CONTENDERS, MODELS, MOST_SEEDS, WORKERS, Contender, run_of
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table

WHICH: tuple[Literal["value", "best"], ...] = ("value", "best")  # the last evaluation, and the best


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    cache = Cache(options.out, str(date.today()))
    if options.pages:
        write_pages(cache)
        return
    runs = [
        run_of(model, CONTENDERS[name], seed)
        for seed in range(options.seeds)
        for model in options.models
        for name in options.only
    ]
    if options.quick:
        runs = [tiny(run) for run in runs]
    if not options.table:
        for run in perform_all(runs, cache, options.data, options.device, options.jobs, options.minutes):
            print(f"not done: {run.title}", flush=True)
    if not options.quick:
        write_table(cache)


def tiny(run: Run) -> Run:
    """Return six steps of a run, with an evaluation at their end."""
    return replace(run, steps=6, batch_size=2, evaluations=1)


def write_table(cache: Cache) -> None:
    """Write the rows of all contenders that have a run."""
    table = Table(
        "trained",
        __doc__ or "",
        [
            *("model", "contender", "settings", "samples, of BSP's"),
            *("seeds", "score", "Δ BSP", "best", "Δ BSP, best", "LSSR", "bytes, of BSP's"),
        ],
    )
    machines: set[str] = set()
    shown: set[str] = set()
    for model in MODELS:
        by_seed = {
            seed: {
                name: outcome
                for name, contender in CONTENDERS.items()
                if (outcome := cache.get(run_of(model, contender, seed)))
            }
            for seed in range(MOST_SEEDS)
        }
        for name, contender in CONTENDERS.items():
            outcomes = {seed: found[name] for seed, found in by_seed.items() if name in found}
            if outcomes:
                shown.add(model)
                machines |= {str(outcome["machine"]) for outcome in outcomes.values()}
                table.row(*row_of(model, name, contender, outcomes, by_seed))
    table.note(f"{WORKERS} workers, cosine schedule, K = C; on {', '.join(sorted(machines))}")
    for model, of in ((name, of) for name, of in MODELS.items() if name in shown):
        table.note(
            f"{model}: {of.epochs} epochs, {of.steps} steps with batches of {of.batch_size},"
            f" learning rate {of.lr:g}{', autocast to bfloat16' if of.precision else ''};"
            f" score: {of.score}; claims go by the {of.claims} evaluation"
        )
    table.write()


def row_of(
    model: str,
    name: str,
    contender: Contender,
    outcomes: dict[int, Outcome],
    by_seed: dict[int, dict[str, Outcome]],
) -> tuple[str, ...]:
    """Return a contender's row."""
    pairs = [(outcome, by_seed[seed]["BSP"]) for seed, outcome in outcomes.items() if "BSP" in by_seed[seed]]
    cells: list[str] = []
    for which in WHICH:
        differences = [score(ours, which) - score(bsp, which) for ours, bsp in pairs] if name != "BSP" else []
        cells += [
            spread([score(outcome, which) for outcome in outcomes.values()], "{:.2f}"),
            spread(differences, "{:+.2f}", half_interval(differences)),
        ]
    fractions = [ours["bytes_sent"] / bsp["bytes_sent"] for ours, bsp in pairs]
    return (
        model,
        name,
        f"{', '.join(contender.settings) or 'defaults'} ({contender.source})",
        str(contender.length),
        str(len(outcomes)),
        *cells,
        f"{statistics.mean(outcome['lssr'] for outcome in outcomes.values()):.2f}",
        f"{statistics.mean(fractions):.2f}" if fractions else "",
    )


def spread(values: list[float], form: str, half: float | None = None) -> str:
    """Format a mean, half of its interval if it is given, and the range of the values."""
    if not values:
        return ""
    low, mean, high = (form.format(value) for value in (min(values), statistics.mean(values), max(values)))
    within = "" if half is None else f" ± {half:.2f}"
    return f"{mean}{within} ({low} to {high})" if len(values) > 1 else mean


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and exit with an error if something is missing."""
    parser = benchmark_parser("trained", __doc__)
    add_data_option(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--quick", action="store_true", help="six tiny steps of every run, no table")
    parser.add_argument("--out", type=Path, help="folder of finished runs (default: among the raw results)")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of cached runs")
    parser.add_argument(
        "--pages",
        action="store_true",
        help="run nothing, put the newest table's rows and the curves on the strategies' pages",
    )
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = Path("runs/trained-quick") if options.quick else RESULTS / "raw" / "trained"
    if not (options.table or options.pages):
        require_data(parser, options)
    return options
