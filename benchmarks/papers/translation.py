"""Did a mean of the workers' own Adam steps cost GSSP and SelSync the BLEU of their Seq2Seq?

    python -m benchmarks run translation --data FOLDER [--epochs 6] [--seeds 40 41] [--only NAME …]

GSSP's Seq2Seq on Multi30k was 7 BLEU behind BSP when workers pushed their own Adam's updates, and SelSync's
4 BLEU, though it averaged the weights in 92% of the steps. "GA" averages gradients instead. Here a smaller
Seq2Seq (embedding 96, hidden 128, 3,000 German and 2,500 English words), small enough for a CPU: 8 workers in
virtual time, four groups whose steps take 1, 1.5, 2 and 4 times as long, batches of 32, equal work, the
paper's staleness and clipping, a constant learning rate. BLEU and perplexity of the published model after the
last step, on the first 250 sentences of the test split: words outside of the vocabulary are never right, so
BLEU is low. Seeds chose no setting.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table, spread
from offbeat import BSP, GSSP, SSP, GDTopK, SelSync, Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.tasks.models.seq2seq import Seq2Seq
from offbeat.experiments.tasks.multi30k import Multi30k
from offbeat.experiments.tasks.translation_data import SentencePairs
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

WORKERS = 8
TESTED = 250
STRATEGIES: dict[str, Strategy[Any]] = {
    "BSP": BSP(),
    "GSSP, update": GSSP(push="update"),
    "GSSP": GSSP(),
    "SSP(3), update": SSP(push="update"),
    "SSP(3)": SSP(),
    "GDTopK": GSSP(sparse=GDTopK()),
    "SelSync": SelSync(delta=0.02),
    "SelSync, GA": SelSync(delta=0.02, aggregate="gradients"),
}


@dataclass(frozen=True, kw_only=True)
class SmallMulti30k(Multi30k):
    """Multi30k by a small Seq2Seq."""

    source_words: int = 3000
    target_words: int = 2500

    def load(self, folder: Path | None = None) -> SentencePairs:
        whole = super().load(folder)
        return SentencePairs(whole.train, whole.test, whole.references[:TESTED], whole.words)

    def build(self) -> nn.Module:
        return Seq2Seq(
            source_words=self.source_words,
            target_words=self.target_words,
            embedding=96,
            hidden=128,
            dropout=0.2,
        )


@lru_cache(maxsize=1)
def load(folder: Path) -> SentencePairs:
    """Load the sentences; a process keeps them."""
    return SmallMulti30k().load(folder)


class Training(NamedTuple):
    """One training: strategy, learning rate, seed and length."""

    strategy: str
    lr: float
    seed: int
    epochs: int

    def outcome(self, folder: Path) -> dict[str, float]:
        """Train; return BLEU and perplexity."""
        torch.set_num_threads(1)
        data = load(folder)
        job = Job(
            task=SmallMulti30k(lr=self.lr),
            strategy=STRATEGIES[self.strategy],
            workers=WORKERS,
            seed=self.seed,
            epochs=self.epochs,
            work="equal",
        )
        job = replace(job, evaluate_every=job.total_steps(len(data)))
        last = simulate(job, load_cluster("paper-gssp").for_workers(WORKERS), data)[-1]
        return {"bleu": last.value, **last.extra_metrics}


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("translation", __doc__)
    add_data_option(parser)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[40])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.004], help="learning rates")
    parser.add_argument("--only", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    measures = ("bleu", "perplexity")
    columns = [f"{measure} at {rate:g}" for rate in options.rates for measure in measures]
    table = Table("translation", __doc__ or "", ["strategy", *columns])
    table.note(f"{options.epochs} epochs, {len(options.seeds)} seeds")
    trainings = [
        Training(name, rate, seed, options.epochs)
        for name in options.only
        for rate in options.rates
        for seed in options.seeds
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # yields in order
        found = pool.map(Training.outcome, trainings, [folder] * len(trainings))
        for name in options.only:
            by_rate = [[next(found) for _ in options.seeds] for _ in options.rates]
            cells = [spread([run[key] for run in runs], 2) for runs in by_rate for key in measures]
            table.row(name, *cells)
    table.write()
