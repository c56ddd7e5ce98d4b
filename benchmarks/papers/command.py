"""What of the papers' claims can be checked in virtual time?

    python -m benchmarks.papers --data DIR [--device cuda] [--jobs 8] [--only selsync,gssp]

Runs what `--out` does not hold yet, each run a line in a file there, and writes the table of all that it
holds to benchmarks/results. Timing comes first, then training with the first seed, then further seeds.
`--table` only writes the table; `--list` only says what there is to do.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.papers import gssp, oscars, osp, selsync, ssd_sgd, ssp
from benchmarks.papers.claims import PARAMETERS, Paper, Run
from benchmarks.papers.runs import Cache, perform_all
from benchmarks.papers.table import write

PAPERS = {module.PAPER.name: module.PAPER for module in (osp, ssd_sgd, selsync, oscars, gssp, ssp)}
KINDS = ("timed", "trained")


def main() -> None:
    options = read_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside; what was done is kept"))
    papers = [adapted(PAPERS[name], options.quick, options.scale) for name in options.only]
    runs = [
        run
        for run in by_value(papers)
        if run.model in options.models and ("trained" if run.looks else "timed") in options.kind
    ]
    cache = Cache(options.out, options.name)
    if options.list:
        for run in runs:
            print(f"{'done' if run in cache else 'to do'}: {run.title}, {run.order}")
        return
    if not options.table:
        left = perform_all(runs, cache, options.data, options.device, options.jobs, options.minutes, say)
        for run in left:
            say(f"not done: {run.title}")
        if options.quick or left or len(options.only) < len(PAPERS):
            sys.exit(f"{len(left)} runs are left; the table is written by --table" if left else 0)
    table = write(papers, cache)
    if options.scale != 1:
        table.note(f"models were trained for {options.scale:g} times the steps that are stated")
    table.write()


def say(text: str) -> None:
    print(text, flush=True)


def adapted(paper: Paper, quick: bool, scale: float) -> Paper:
    """With shorter runs, where that was asked for."""

    def shorter(run: Run) -> Run:
        return run.quick() if quick else run.scaled(scale)

    claims = [
        replace(claim, runs={name: tuple(map(shorter, runs)) for name, runs in claim.runs.items()})
        for claim in paper.claims
    ]
    return replace(paper, claims=claims)


def by_value(papers: Iterable[Paper]) -> list[Run]:
    """Each run once: what is cheap first, then what most claims need, further seeds last."""
    runs = dict.fromkeys(
        run for paper in papers for claim in paper.claims for some in claim.runs.values() for run in some
    )
    return sorted(runs, key=lambda run: (run.looks > 0, run.seed > 0, run.model != "resnet18"))


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(known: Iterable[str]) -> dict[str, object]:
        known = list(known)

        def some(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
            return chosen

        return {"type": some, "default": known, "help": f"some of {','.join(known)}; all by default"}

    parser.add_argument(
        "--data", type=Path, default=os.environ.get("OFFBEAT_DATA"), help="folder of the data sets"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, in processes of their own")
    parser.add_argument("--only", **names(PAPERS))
    parser.add_argument("--models", **names(PARAMETERS))
    parser.add_argument("--kind", **names(KINDS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many steps of training")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, and no table")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="folder of finished runs")
    parser.add_argument(
        "--name", default="runs", help="of the file there: one a machine, to be brought together"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of what there is")
    parser.add_argument("--list", action="store_true", help="run nothing, say what there is to do")
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.scale <= 0:
        parser.error("--jobs must be at least 1, and --scale above 0")
    if not (options.list or options.table or options.data):
        parser.error("the data sets are needed: give --data DIR, or set OFFBEAT_DATA")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no such device here; give cpu")
    return options


if __name__ == "__main__":
    main()
