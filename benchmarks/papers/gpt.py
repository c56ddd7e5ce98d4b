"""At the field's own task, what do DiLoCo and its kin lose and save?

    python -m benchmarks run gpt --data FOLDER --device cuda [--minutes 9] [--only NAME …]
    python -m benchmarks run gpt --data FOLDER --device cuda --steps 2560     # four times as long
    python -m benchmarks run gpt --times

A byte-level GPT of 10.8 million parameters on WikiText-2: 8 workers with batches of 8 windows of 256 bytes,
all for equally many tokens, learning rates that rise and then fall to 0. The first command trains: one
process, one run after the other, each kept in `--out` as soon as it is finished; none is started that would
not end within `--minutes`, as far as earlier runs tell. The second one needs no GPU: it times the exchanges
in virtual time on three clusters. Both then write the table of all that is there, so it can grow over days.

Losses are those of the published model on the first 262,144 bytes of the test text, in nats per byte. DiLoCo
publishes its global weights, which under `eager=True` lack the last period. Learning rates and outer settings
were not searched for.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from benchmarks.catalog import RESULTS
from benchmarks.papers.claims import Outcome
from benchmarks.papers.gpt_run import GPTRun, perform
from benchmarks.papers.runs import Cache
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table

CLUSTERS = ("wan", "lan-1g", "lan-10g")
EVALUATIONS = 8
MOST_SEEDS = 10
TWO_BITS = "codec=error_feedback(quantize(2))"
HALF = "outer_momentum=0.5"


@dataclass(frozen=True)
class Contender:
    """A strategy with its settings, and the inner optimizer."""

    strategy: str
    settings: tuple[str, ...] = ()
    inner: str = "adamw"


# in the order in which they are run: the most telling first, where time is short
CONTENDERS = {
    "DDP": Contender("bsp"),
    "DiLoCo, H 32": Contender("diloco", ("period=32",)),
    "eager, H 32": Contender("diloco", ("period=32", "eager=true")),
    "streaming, H 32": Contender("diloco", ("period=32", "fragments=4", "delay=4", "mix=0.5")),
    "SparseLoCo, H 32": Contender("sparse_loco", ("period=32",)),
    "MuLoCo, H 32": Contender("diloco", ("period=32",), "muon"),
    "DiLoCo, H 128": Contender("diloco", ("period=128",)),
    "DDP, Muon": Contender("bsp", (), "muon"),
    "MuLoCo, H 32, 2 bits": Contender("diloco", ("period=32", TWO_BITS), "muon"),
    "DiLoCo, H 8": Contender("diloco", ("period=8",)),
    "eager, H 32, μ 0.5": Contender("diloco", ("period=32", HALF, "eager=true")),
    "SparseLoCo, H 128": Contender("sparse_loco", ("period=128",)),
    "DiLoCo, H 32, 2 bits": Contender("diloco", ("period=32", TWO_BITS)),
    "eager, H 128": Contender("diloco", ("period=128", "eager=true")),
    "streaming, H 128": Contender("diloco", ("period=128", "fragments=4", "delay=4", "mix=0.5")),
    "MuLoCo, H 128": Contender("diloco", ("period=128",), "muon"),
    # An outer momentum of 0.9 multiplies the mean of the workers' changes by 7 in the long run.
    "DiLoCo, H 32, μ 0.5": Contender("diloco", ("period=32", HALF)),
    "DiLoCo, H 8, μ 0.5": Contender("diloco", ("period=8", HALF)),
    "LocalSGD, H 32": Contender("local_sgd", ("period=32",)),
    "DiLoCo, H 128, μ 0.5": Contender("diloco", ("period=128", HALF)),
    "streaming, H 32, μ 0.5": Contender("diloco", ("period=32", "fragments=4", "delay=4", "mix=0.5", HALF)),
    "MuLoCo, H 32, μ 0.5": Contender("diloco", ("period=32", HALF), "muon"),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    steps: int = 640
    layers: int = 6
    width: int = 384
    context: int = 256
    batch_size: int = 8


QUICK = Sizes(steps=64, layers=1, width=16, context=16, batch_size=2)


def run_of(contender: Contender, seed: int, sizes: Sizes) -> GPTRun:
    """Return the trained run of a contender."""
    return GPTRun(
        strategy=contender.strategy,
        settings=contender.settings,
        inner=contender.inner,
        seed=seed,
        **vars(sizes),
    )


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    cache = Cache(options.out, str(date.today()))
    sizes = QUICK if options.quick else Sizes(steps=options.steps)
    chosen = [CONTENDERS[name] for name in options.only]
    trained = [run_of(contender, seed, sizes) for seed in range(options.seeds) for contender in chosen]
    if options.device != "cpu":
        torch.set_float32_matmul_precision("high")
    if not options.times:
        train(trained, cache, options.data, options.device, options.minutes)
    if options.times or options.quick:
        for run in dict.fromkeys(run.timed(cluster) for run in trained for cluster in CLUSTERS):
            if run not in cache:
                add(cache, run, perform(run, None, "cpu", 0))
    usual = options.steps == Sizes.steps
    write_table(cache, sizes, "quick" if options.quick else "" if usual else f"{options.steps}-steps")


def train(runs: Iterable[GPTRun], cache: Cache, data: Path, device: str, minutes: float) -> None:
    """Train what is not cached, one run after the other, while there is time for the longest so far."""
    began = time.monotonic()
    longest: dict[str, float] = {}
    for run in runs:
        if run in cache:
            continue
        left_s = 60 * minutes - (time.monotonic() - began)
        if left_s < longest.get(run.inner, max(longest.values(), default=0.0)):
            print(f"not started, for lack of time: {run.title}", flush=True)
            continue
        try:
            outcome = perform(run, data, device, EVALUATIONS)
        except RuntimeError as problem:  # continue with the other runs
            print(f"FAILED: {run.title}: {type(problem).__name__}: {problem}", flush=True)
            continue
        longest[run.inner] = max(longest.get(run.inner, 0.0), outcome["took_s"])
        add(cache, run, outcome)


def add(cache: Cache, run: GPTRun, outcome: Outcome) -> None:
    """Keep an outcome, and print it."""
    cache.add(run, outcome)
    result = f"{outcome['step_s']:.4f} s per step" if run.cluster else f"loss {outcome['value']}"
    print(f"{run.title}: took {outcome['took_s']:.1f} s, {result}", flush=True)


def write_table(cache: Cache, sizes: Sizes, variant: str) -> None:
    """Write the rows of all contenders that have a trained run."""
    columns = ["contender", "settings", "inner", "seeds", "loss", "Δ DDP", "bytes of a worker, of DDP's"]
    table = Table("gpt", __doc__ or "", [*columns, *(f"s on {name}, x DDP" for name in CLUSTERS)], variant)
    machines: set[str] = set()
    for name, contender in CONTENDERS.items():
        runs = [run_of(contender, seed, sizes) for seed in range(MOST_SEEDS)]
        outcomes = {run.seed: outcome for run in runs if (outcome := cache.get(run))}
        if not outcomes:
            continue
        machines |= {str(outcome["machine"]) for outcome in outcomes.values()}
        ddp = [run_of(Contender("bsp", (), contender.inner), seed, sizes) for seed in outcomes]
        table.row(
            name,
            ", ".join(contender.settings) or "defaults",
            contender.inner,
            str(len(outcomes)),
            mean([outcome["value"] for outcome in outcomes.values()], "{:.4f}"),
            difference(list(outcomes.values()), [cache.get(run) for run in ddp]),
            fraction(
                next(iter(outcomes.values())),
                cache.get(ddp[0]) or cache.get(run_of(CONTENDERS["DDP"], 0, sizes)),
            ),
            *(seconds(cache, runs[0], cluster) for cluster in CLUSTERS),
        )
    steps = sizes.steps
    table.note(f"8 workers, {steps} steps, cosine schedule; trained on {', '.join(sorted(machines)) or '–'}")
    table.note("Δ DDP is against DDP with the same inner optimizer and seed")
    table.note(f"s: virtual seconds of {steps} steps in the steady state; computing takes 50 ms each")
    table.write()


def mean(values: Sequence[float | None], form: str) -> str:
    """Format a mean with its range; a run that diverged has no value."""
    numbers = [math.nan if value is None else value for value in values]
    if len(numbers) == 1:
        return form.format(numbers[0])
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return f"{form.format(statistics.mean(numbers))} ({low} to {high})"


def difference(ours: Sequence[Outcome], theirs: Sequence[Outcome | None]) -> str:
    """Format the mean difference of losses, between runs of the same seed."""
    pairs = [(a["value"], b["value"]) for a, b in zip(ours, theirs, strict=True) if b is not None]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return mean(differences, "{:+.4f}") if differences else ""


def fraction(ours: Outcome, ddp: Outcome | None) -> str:
    """Format the bytes of a worker, and as a fraction of DDP's."""
    total = f"{ours['bytes_sent'] / ours['workers'] / 1e6:.0f} MB"
    return f"{total}, {ours['bytes_sent'] / ddp['bytes_sent']:.4f}" if ddp else total


def seconds(cache: Cache, run: GPTRun, cluster: str) -> str:
    """Format the seconds of a run on a cluster, and how many times faster than DDP it is."""
    ours = cache.get(run.timed(cluster))
    ddp = cache.get(GPTRun(**{**vars(run), "strategy": "bsp", "settings": ()}).timed(cluster))
    if ours is None:
        return ""
    shown = f"{run.steps * ours['step_s']:.1f}"
    return f"{shown}, {ddp['step_s'] / ours['step_s']:.2f}" if ddp else shown


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and exit with an error if something is missing."""
    parser = benchmark_parser("gpt", __doc__)
    add_data_option(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for training")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="for all; a table for each length")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--times", action="store_true", help="time the exchanges, and train nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that the code works")
    parser.add_argument("--out", type=Path, default=RESULTS / "raw" / "gpt", help="folder of the runs")
    options = parser.parse_args(arguments)
    if not options.times:
        require_data(parser, options)
    return options
