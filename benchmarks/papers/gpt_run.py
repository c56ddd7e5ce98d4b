"""One run of the benchmark gpt: a byte-level GPT on WikiText-2 in virtual time, trained or only timed.

A *trained* run gives the loss and the bytes. The strategies of this benchmark never look at the clock, so the
network does not change what they train. A *timed* run gives the seconds on one cluster: the same model and
the same exchanges, with gradients that cost nothing to compute. Its steps are a few whole periods, of which
the first one does not count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.papers.claims import Outcome
from benchmarks.papers.runs import StepTimes
from offbeat.core.ledger import Ledger
from offbeat.core.settings import build, lookup, parse_pairs
from offbeat.core.strategy import Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.summary import summarize
from offbeat.experiments.tasks.base import Batch, BatchSize, Data
from offbeat.experiments.tasks.files.compression import content
from offbeat.experiments.tasks.files.locate import locate
from offbeat.experiments.tasks.language import Context, LanguageTask, TextData
from offbeat.experiments.tasks.models.transformer import Transformer
from offbeat.experiments.tasks.wikitext import WikiText2
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster

BYTES = 256  # a token is a byte
TEST_BYTES = 1 << 18  # of the test text, which has 1.3 million
HEAD = 64  # width of an attention head
TIMED_STEPS = 16  # at least


@dataclass(frozen=True, kw_only=True)
class GPTTask(LanguageTask):
    """A GPT that predicts the next byte of WikiText-2. The metric is the mean of −ln p."""

    name: ClassVar[str] = "gpt"
    summary: ClassVar[str] = "bytes of WikiText-2"
    metric: ClassVar[str] = "loss"
    models: ClassVar[tuple[str, ...]] = ("gpt",)

    batch_size: BatchSize = 8
    lr: float = 1e-3
    context: Context = 256
    layers: int = 6
    width: int = 384
    inner: str = "adamw"  # or "muon", for the matrices inside the layers

    def load(self, folder: Path | None = None) -> TextData:
        return _load(folder, self.context)

    def texts(self, folder: Path | None) -> tuple[list[int], list[int]]:
        raise NotImplementedError("read as tensors: ten million numbers are many for a list")

    def build(self) -> nn.Module:
        return Transformer(
            tokens=BYTES,
            context=self.context,
            layers=self.layers,
            heads=max(1, self.width // HEAD),
            width=self.width,
            hidden=4 * self.width,
        )

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.get_submodule("layers").parameters() if p.ndim == 2]
        if self.inner == "adamw":
            matrices = []
        chosen = set(matrices)
        others = [p for p in model.parameters() if p not in chosen]
        adamw = torch.optim.AdamW(
            others, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=others[0].is_cuda
        )
        if not matrices:
            return [adamw]
        return [torch.optim.Muon(matrices, lr=self.lr, adjust_lr_fn="match_rms_adamw"), adamw]

    def per_token(self, nats: float) -> float:
        return nats


class Idle(torch.optim.Optimizer):
    """An optimizer that changes nothing."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class TimedTask(GPTTask):
    """The same model, with gradients of zeros, and no evaluation."""

    max_norm: ClassVar[float | None] = None
    zeros: dict[nn.Parameter, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def load(self, folder: Path | None = None) -> TextData:
        text = torch.zeros(100 * self.batch_size * (self.context + 1), dtype=torch.long)
        return TextData(text, text[:2], self.context)

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [Idle(model.parameters())]

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        for param in model.parameters():
            param.grad = self.zeros.setdefault(param, torch.zeros_like(param))
        return torch.zeros(())

    def evaluate(self, model: nn.Module, data: Data) -> float:
        return math.nan


@lru_cache(maxsize=1)
def _load(folder: Path | None, context: int) -> TextData:
    paths = locate("wikitext2", WikiText2.manifest, folder).values()
    train, test = (torch.frombuffer(bytearray(content(p, "text")), dtype=torch.uint8) for p in paths)
    return TextData(train.long(), test[:TEST_BYTES].long(), context)


@dataclass(frozen=True, kw_only=True)
class GPTRun:
    """A run; its outcome depends on these fields only, so they are its cache key."""

    strategy: str
    settings: tuple[str, ...] = ()  # in the form of --set
    inner: str = "adamw"
    lr: float = 1e-3
    steps: int = 640
    workers: int = 8
    batch_size: int = 8
    context: int = 256
    layers: int = 6
    width: int = 384
    seed: int = 0
    cluster: str = ""  # a timed run on that cluster; empty: a trained run

    @property
    def key(self) -> str:
        return json.dumps({"benchmark": "gpt", **asdict(self)}, sort_keys=True)

    @property
    def title(self) -> str:
        settings = f"({', '.join(self.settings)})" if self.settings else ""
        what = f"timed on {self.cluster}" if self.cluster else f"{self.steps} steps, seed {self.seed}"
        return f"{self.strategy}{settings}, {self.inner}, lr {self.lr:g}, {what}"

    @property
    def built(self) -> Strategy[Any]:
        """The strategy."""
        return build(lookup("strategy", self.strategy, STRATEGIES), parse_pairs(self.settings))

    def timed(self, cluster: str) -> GPTRun:
        """Return the run that times this one; optimizers, inner and outer, and seeds take no virtual time."""
        settings = tuple(setting for setting in self.settings if not setting.startswith("outer_momentum="))
        return replace(self, cluster=cluster, settings=settings, inner="adamw", lr=1e-3, seed=0, steps=0)


def perform(run: GPTRun, data: Path | None, device: str, evaluations: int) -> Outcome:
    """Train a run, or time it; return its summary without the parts of single workers."""
    began = time.perf_counter()
    sizes = {name: getattr(run, name) for name in ("batch_size", "context", "layers", "width", "inner", "lr")}
    period = getattr(run.built, "period", 1)
    steps = run.steps if not run.cluster else period * (1 + max(2, -(-TIMED_STEPS // period)))
    task = TimedTask(**sizes) if run.cluster else GPTTask(**sizes)
    job = Job(
        task=task,
        strategy=run.built,
        workers=run.workers,
        seed=run.seed,
        steps=steps,
        evaluate_every=steps if run.cluster else -(-steps // evaluations),
        schedule="cosine",
        work="equal",
    )
    ledgers: list[Ledger] = []
    times = StepTimes()

    def watchers(of_workers: list[Ledger]) -> Sequence[Callback]:
        ledgers.extend(of_workers)
        return [times]

    samples = task.load(data).to(device)
    history = simulate(job, load_cluster(run.cluster or "lan-1g"), samples, watchers, device)
    totals = [ledger.totals() for ledger in ledgers]
    summary = summarize(
        job,
        "virtual",
        history,
        totals,
        complete=True,
        step_s=(times.seconds[-1] - times.seconds[period - 1]) / (steps - period),
        took_s=time.perf_counter() - began,
        machine=f"{torch.cuda.get_device_name() if device != 'cpu' else 'CPU'}, torch {torch.__version__}",
    )
    del summary["per_worker"]
    return {name: None if value != value else value for name, value in summary.items()}
