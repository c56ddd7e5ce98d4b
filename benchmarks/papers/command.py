"""Do the papers' claims hold here?

    python -m benchmarks run papers --data FOLDER [--device cuda] [--jobs 8] [--only selsync,gssp]

Executes the runs that the cache in `--out` does not have yet, and writes the table of all cached runs to
benchmarks/results. Timed runs come first, then training with the first seed, then further seeds. `--table`
only writes the table; `--list` only lists the runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.papers import gssp, oscars, osp, selsync, ssd_sgd, ssp
from benchmarks.papers.claims import PARAMETERS, Paper, Run
from benchmarks.papers.runs import Cache, perform_all
from benchmarks.papers.table import build_table
from benchmarks.support.options import add_data_option, benchmark_parser, require_data

PAPERS = {module.PAPER.name: module.PAPER for module in (osp, ssd_sgd, selsync, oscars, gssp, ssp)}
KINDS = ("timed", "trained")


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated; finished runs are in the cache"))
    papers = [shorten(PAPERS[name], options.quick, options.scale) for name in options.only]
    runs = [
        run
        for run in runs_in_order(papers)
        if run.model in options.models and ("trained" if run.evaluations else "timed") in options.kind
    ]
    cache = Cache(options.out, options.name)
    if options.list:
        for run in runs:
            print(f"{'done' if run in cache else 'to do'}: {run.title}, {run.order}")
        return
    if not options.table:
        left = perform_all(
            runs, cache, options.data, options.device, options.jobs, options.minutes, print_now
        )
        for run in left:
            print_now(f"not done: {run.title}")
        if options.quick or left or len(options.only) < len(PAPERS):
            sys.exit(f"{len(left)} runs are left; --table writes the table" if left else 0)
    table = build_table(papers, cache)
    if options.scale != 1:
        table.note(f"models were trained for {options.scale:g}x the stated number of steps")
    table.write()


def print_now(text: str) -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def shorten(paper: Paper, quick: bool, scale: float) -> Paper:
    """Return the paper with the runs that --quick or --scale ask for."""

    def shorten_run(run: Run) -> Run:
        return run.quick() if quick else run.scaled(scale)

    claims = [
        replace(claim, runs={name: tuple(map(shorten_run, runs)) for name, runs in claim.runs.items()})
        for claim in paper.claims
    ]
    return replace(paper, claims=claims)


def runs_in_order(papers: Iterable[Paper]) -> list[Run]:
    """Return each run once: timed ones first, then the first seed, ResNet-18 first, then further seeds."""
    runs = dict.fromkeys(
        run for paper in papers for claim in paper.claims for some in claim.runs.values() for run in some
    )
    return sorted(runs, key=lambda run: (run.evaluations > 0, run.seed > 0, run.model != "resnet18"))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and exit with an error if something is missing."""
    parser = benchmark_parser("papers", __doc__)

    def names(known: Iterable[str]) -> dict[str, object]:
        known = list(known)

        def split(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
            return chosen

        return {"type": split, "default": known, "help": f"some of {','.join(known)} (default: all)"}

    add_data_option(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--only", **names(PAPERS))
    parser.add_argument("--models", **names(PARAMETERS))
    parser.add_argument("--kind", **names(KINDS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of training")
    parser.add_argument("--quick", action="store_true", help="a few steps of every run, no table")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="folder of finished runs")
    parser.add_argument(
        "--name",
        default="runs",
        help="name of the file in --out; one per machine, so that they can be merged",
    )
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of cached runs")
    parser.add_argument("--list", action="store_true", help="run nothing, list the runs")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.scale <= 0:
        parser.error("--jobs must be at least 1, and --scale above 0")
    if not (options.list or options.table):
        require_data(parser, options)
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no such device; give cpu")
    return options
