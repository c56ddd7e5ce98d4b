"""Trained to the end, is each method as accurate as BSP?

    python -m benchmarks run trained --data FOLDER --device cuda [--minutes 20] [--models resnet18]

The papers' models on real data, with the usual augmentation and a learning rate that rises and then falls to
0, all methods for equally many samples. Finished runs are kept in `--out`, by default among the raw results.
Runs that are not there yet are executed, and none is started after `--minutes`. Then the table of all runs
is written: it can grow over days. Several `--jobs` on one GPU need NVIDIA's MPS
(`nvidia-cuda-mps-control -d`): without it processes take turns on the GPU, and hold each other up.
Differences are between runs of the same seed. Settings were not chosen on these seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.catalog import RESULTS
from benchmarks.papers.claims import Outcome, Run, ring_s
from benchmarks.papers.runs import Cache, perform_all
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table

WORKERS, BATCH, BITS_PER_S = 8, 32, 1e9
EVALUATIONS = 15
MOST_SEEDS = 20
FIRST_SEED = 10  # the papers' short runs, and searches for settings, used 0 to 9


@dataclass(frozen=True)
class Model:
    """A model, its data, and the length of training."""

    task: str
    samples: int
    epochs: int
    lr: float

    @property
    def steps(self) -> int:
        return self.epochs * (self.samples // (WORKERS * BATCH))


MODELS = {
    "lenet5": Model("mnist", 60_000, 15, 0.05),
    "resnet18": Model("cifar10", 50_000, 30, 0.1),
    "vgg11": Model("cifar10", 50_000, 30, 0.05),
    "vgg19": Model("cifar10", 50_000, 30, 0.05),
}


@dataclass(frozen=True)
class Contender:
    """A strategy with its settings; `source` says whose the settings are."""

    strategy: str
    settings: tuple[str, ...] = ()
    source: str = "defaults"
    order: str = "shuffled"
    cluster: str = "lan-1g"
    work: str = "equal"


CONTENDERS = {
    "BSP": Contender("bsp"),
    "OSP": Contender("osp"),
    "SSD-SGD": Contender("ssd_sgd"),
    "SelSync, δ 0.3, SelDP": Contender("selsync", ("delta=0.3",), "the paper's", "seldp"),
    "SelSync, δ 0.1": Contender("selsync", ("delta=0.1",), "ours"),
    "LocalSGD, period 8": Contender("local_sgd", ("period=8",), "ours"),
    "DiLoCo, period 16": Contender("diloco", ("period=16", "outer_momentum=0.5"), "ours"),
    "SSP(3)": Contender("ssp", ("staleness=3",), "the paper's"),
    "GSSP": Contender("gssp", cluster="mixed-gpus", work="shared"),
    "GDTopK": Contender("gssp", ("sparse=gdtopk",), cluster="mixed-gpus", work="shared"),
    "Oscars": Contender("oscars", cluster="mixed-gpus", work="shared"),
    # All workers make equally many steps, so the fast ones end long before the slow ones.
    "GSSP, equal work": Contender("gssp", cluster="mixed-gpus"),
    "GDTopK, equal work": Contender("gssp", ("sparse=gdtopk",), cluster="mixed-gpus"),
    "Oscars, equal work": Contender("oscars", cluster="mixed-gpus"),
}


def run_of(model: str, contender: Contender, seed: int) -> Run:
    """Return the run of a contender with one seed; computing a step takes as long as exchanging the model."""
    of = MODELS[model]
    return Run(
        task=of.task,
        model=model,
        strategy=contender.strategy,
        settings=contender.settings,
        cluster=contender.cluster,
        step_s=ring_s(model, WORKERS, BITS_PER_S),
        workers=WORKERS,
        steps=of.steps,
        batch_size=BATCH,
        lr=of.lr,
        seed=FIRST_SEED + seed,
        order=contender.order,
        evaluations=EVALUATIONS,
        schedule="cosine",
        work=contender.work,
    )


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    runs = [
        run_of(model, CONTENDERS[name], seed)
        for seed in range(options.seeds)
        for model in options.models
        for name in options.only
    ]
    cache = Cache(options.out, str(date.today()))
    if not options.table:
        for run in perform_all(runs, cache, options.data, options.device, options.jobs, options.minutes):
            print(f"not done: {run.title}", flush=True)
    write_table(cache)


def write_table(cache: Cache) -> None:
    """Write the rows of all contenders that have a run."""
    table = Table(
        "trained",
        __doc__ or "",
        ["model", "contender", "settings", "seeds", "accuracy", "Δ BSP, points", "LSSR", "bytes, of BSP's"],
    )
    machines: set[str] = set()
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
                machines |= {str(outcome["machine"]) for outcome in outcomes.values()}
                table.row(*row_of(model, name, contender, outcomes, by_seed))
    table.note(
        f"{WORKERS} workers with batches of {BATCH}, cosine schedule, K = C; on {', '.join(sorted(machines))}"
    )
    for model, of in MODELS.items():
        table.note(f"{model}: {of.epochs} epochs, {of.steps} steps, learning rate {of.lr:g}")
    table.write()


def row_of(
    model: str,
    name: str,
    contender: Contender,
    outcomes: dict[int, Outcome],
    by_seed: dict[int, dict[str, Outcome]],
) -> tuple[str, ...]:
    """Return a contender's row."""
    scores = [100 * outcome["value"] for outcome in outcomes.values()]
    pairs = [(outcome, by_seed[seed]["BSP"]) for seed, outcome in outcomes.items() if "BSP" in by_seed[seed]]
    differences = [100 * (ours["value"] - bsp["value"]) for ours, bsp in pairs] if name != "BSP" else []
    fractions = [ours["bytes_sent"] / bsp["bytes_sent"] for ours, bsp in pairs]
    return (
        model,
        name,
        f"{', '.join(contender.settings) or 'defaults'} ({contender.source})",
        str(len(scores)),
        spread(scores, "{:.2f}"),
        spread(differences, "{:+.2f}"),
        f"{statistics.mean(outcome['lssr'] for outcome in outcomes.values()):.2f}",
        f"{statistics.mean(fractions):.2f}" if fractions else "",
    )


def spread(values: list[float], form: str) -> str:
    """Format a mean with the range of its values."""
    if not values:
        return ""
    low, mean, high = (form.format(value) for value in (min(values), statistics.mean(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


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
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "raw" / "trained", help="folder of finished runs"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of cached runs")
    options = parser.parse_args(arguments)
    if not options.table:
        require_data(parser, options)
    return options
