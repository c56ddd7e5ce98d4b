"""The runs of the benchmark trained: the papers' models with their data, and the strategies with settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.papers.claims import Run, ring_s

WORKERS, BITS_PER_S = 8, 1e9
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
    batch_size: int = 32
    score: str = "accuracy in percent"
    claims: Literal["last", "best"] = "last"  # evaluation: the best where BSP overfits before its end
    network: str = ""  # as the task calls it; empty: as here
    optimizer: str = ""  # empty: the task's own
    precision: str = ""  # as of a run

    @property
    def steps(self) -> int:
        return self.epochs * (self.samples // (WORKERS * self.batch_size))


MODELS = {
    "lenet5": Model("mnist", 60_000, 15, 0.05),
    "resnet18": Model("cifar10", 50_000, 30, 0.1),
    # at AdamW's usual rate and torch's weight decay of 0.01: neither was searched for
    "resnet18-adamw": Model(
        "cifar10", 50_000, 30, 0.001, network="resnet18", optimizer="adamw", precision="bfloat16"
    ),
    "vgg11": Model("cifar10", 50_000, 30, 0.05),
    "vgg19": Model("cifar10", 50_000, 30, 0.05),
    "vgg19-bf16": Model("cifar10", 50_000, 30, 0.05, network="vgg19", precision="bfloat16"),
    "transformer": Model("wikitext2", 59_675, 15, 0.001, 20, "perplexity, lower is better", "best"),
    "seq2seq": Model("multi30k", 29_000, 12, 0.001, 32, "BLEU"),
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
    length: int = 1  # times the steps of the others
    rate: float = 1  # times the learning rate of the others


CONTENDERS = {
    "BSP": Contender("bsp"),
    "OSP": Contender("osp"),
    "SSD-SGD": Contender("ssd_sgd"),
    "SSD-SGD, no warm-up": Contender("ssd_sgd", ("warmup=0",), "ours"),
    "SSD-SGD, k 2": Contender("ssd_sgd", ("delay=2",), "ours"),
    "SSD-SGD, authors' rule": Contender(
        "ssd_sgd", ("rule=authors", "alpha=2", "warmup=500", "staggered=false"), "the paper's"
    ),
    "SelSync, δ 0.3, SelDP": Contender("selsync", ("delta=0.3",), "the paper's", "seldp"),
    "SelSync, δ 0.2": Contender("selsync", ("delta=0.2",), "ours"),
    "SelSync, δ 0.15": Contender("selsync", ("delta=0.15",), "ours"),
    "SelSync, δ 0.1": Contender("selsync", ("delta=0.1",), "ours"),
    "SelSync, δ 0.1, SelDP": Contender("selsync", ("delta=0.1",), "ours", "seldp"),
    "SelSync, δ 0.1, DefDP": Contender("selsync", ("delta=0.1",), "ours", "defdp"),
    "SelSync, δ 0.05": Contender("selsync", ("delta=0.05",), "ours"),
    "LocalSGD, period 8": Contender("local_sgd", ("period=8",), "ours"),
    "DiLoCo, period 16": Contender("diloco", ("period=16", "outer_momentum=0.5"), "ours"),
    "SSP(3)": Contender("ssp", ("staleness=3",), "the paper's"),
    "GSSP": Contender("gssp", cluster="mixed-gpus", work="shared"),
    "GSSP, updates": Contender("gssp", ("push=update",), "ours", cluster="mixed-gpus", work="shared"),
    "GDTopK": Contender("gssp", ("sparse=gdtopk",), cluster="mixed-gpus", work="shared"),
    "Oscars": Contender("oscars", cluster="mixed-gpus", work="shared"),
    "ASP": Contender("asp", cluster="mixed-gpus", work="shared"),
    "DSSP": Contender("dssp", cluster="mixed-gpus", work="shared"),
    "SparseLoCo, period 16": Contender("sparse_loco", ("period=16",), "ours"),
    "Auto": Contender("auto"),
    # Under Adam a push is a step of its own along a noisier gradient; a mean of such steps is short.
    "BSP, rate x4": Contender("bsp", source="ours", rate=4),
    "GSSP, rate x4": Contender("gssp", source="ours", cluster="mixed-gpus", work="shared", rate=4),
    "GSSP, updates, rate x4": Contender(
        "gssp", ("push=update",), "ours", cluster="mixed-gpus", work="shared", rate=4
    ),
    "SelSync, δ 0.1, rate x4": Contender("selsync", ("delta=0.1",), "ours", rate=4),
    "SelSync, δ 0.02": Contender("selsync", ("delta=0.02",), "ours"),
    "SelSync, δ 0.02, rate x4": Contender("selsync", ("delta=0.02",), "ours", rate=4),
    "SelSync, δ 0.02, GA": Contender("selsync", ("delta=0.02", "aggregate=gradients"), "ours"),
    # All workers make equally many steps, so the fast ones end long before the slow ones.
    "GSSP, equal work": Contender("gssp", cluster="mixed-gpus"),
    "GDTopK, equal work": Contender("gssp", ("sparse=gdtopk",), cluster="mixed-gpus"),
    "GDTopK, authors' table, equal work": Contender(
        "gssp", ("sparse=gdtopk(floor=0)",), "the paper's", cluster="mixed-gpus"
    ),
    "Oscars, equal work": Contender("oscars", cluster="mixed-gpus"),
}
# The second budget: does a method catch up in the end, and does BSP itself still improve?
LONGER = (
    *("BSP", "OSP", "SSD-SGD", "GSSP", "GDTopK"),
    *("SelSync, δ 0.3, SelDP", "SelSync, δ 0.2", "SelSync, δ 0.1", "SelSync, δ 0.02"),
)
CONTENDERS |= {f"{name}, twice as long": replace(CONTENDERS[name], length=2) for name in LONGER}


def run_of(model: str, contender: Contender, seed: int) -> Run:
    """Return the run of a contender with one seed; computing a step takes as long as exchanging the model."""
    of = MODELS[model]
    network = of.network or model
    return Run(
        task=of.task,
        model=network,
        strategy=contender.strategy,
        settings=contender.settings,
        cluster=contender.cluster,
        step_s=ring_s(network, WORKERS, BITS_PER_S),
        workers=WORKERS,
        steps=contender.length * of.steps,
        batch_size=of.batch_size,
        lr=contender.rate * of.lr,
        seed=FIRST_SEED + seed,
        order=contender.order,
        evaluations=EVALUATIONS,
        schedule="cosine",
        work=contender.work,
        optimizer=of.optimizer,
        precision=of.precision,
    )
