"""Claims of papers: source, the paper's figure, the runs that check it, and our figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.support import limits

Outcome = dict[str, Any]  # fields of summary.json, and those that `runs.perform` adds
Outcomes = Mapping[str, Sequence[Outcome]]  # by contender; one outcome per seed
Mark = Literal["paper", "code", "abstract"]

# parameters of 4 bytes each, as in docs/tasks.md; a test counts them
PARAMETERS = {
    "lenet5": 61_706,
    "resnet18": 11_173_962,
    "vgg11": 9_231_114,
    "vgg19": 20_040_522,
    "seq2seq": 12_046_192,
    "transformer": 7_147_000,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run in virtual time; its outcome depends on these fields only, so they are its cache key."""

    task: str
    model: str
    strategy: str
    settings: tuple[str, ...] = ()  # in the form of --set
    cluster: str
    step_s: float | None = None  # of the fastest group, others in proportion; None: the preset's
    workers: int = 16
    steps: int
    batch_size: int
    lr: float | None = None
    seed: int = 0
    order: str = "shuffled"
    evaluations: int = 0  # 0: the run is only timed
    schedule: str = "constant"  # of learning rates
    work: str = "equal"  # or "shared", as for `simulate --work`
    optimizer: str = ""  # one of `runs.OPTIMIZERS`; empty: the task's own
    precision: str = ""  # "bfloat16": autocast, and images with channels last; empty: float32, TF32 on a GPU

    @property
    def key(self) -> str:
        fields = asdict(self)
        if self.schedule == "constant":  # as runs were cached before there were schedules
            del fields["schedule"]
        if self.work == "equal":  # as runs were cached before work could be shared
            del fields["work"]
        for name in ("optimizer", "precision"):
            if not fields[name]:  # as runs were cached before there was a choice
                del fields[name]
        return json.dumps(fields, sort_keys=True)

    @property
    def title(self) -> str:
        settings = f"({', '.join(self.settings)})" if self.settings else ""
        step = f" of {self.step_s:.3g} s" if self.step_s else ""
        what = f"{'trained' if self.evaluations else 'timed'} for {self.steps} steps{step}"
        model = f"{self.model} with {self.optimizer}" if self.optimizer else self.model
        return f"{model} {self.strategy}{settings}, {self.workers} workers, {what}, seed {self.seed}"

    def seeds(self, count: int) -> tuple[Run, ...]:
        """Return this run with each of the first `count` seeds."""
        return tuple(replace(self, seed=seed) for seed in range(count))

    def scaled(self, factor: float) -> Run:
        """Return the run with `factor` times as many steps of training; timed runs stay as they are."""
        return (
            replace(self, steps=max(self.evaluations, round(factor * self.steps)))
            if self.evaluations
            else self
        )

    def quick(self) -> Run:
        """Return a tiny version of the run, which only shows that the code works; many runs share one."""
        return replace(self, steps=6, workers=4, batch_size=2, evaluations=0, step_s=None, seed=0)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table."""

    claim: str
    mark: Mark  # where the figure was read
    figure: str  # the paper's; empty: the source makes the claim in words only
    source: str = ""  # quotation around the figure
    runs: Mapping[str, tuple[Run, ...]]  # by contender; one run per seed
    ours: Callable[[Outcomes], str]
    settings: str
    why: str  # our figure differs, or may differ


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper and its claims."""

    name: str
    title: str
    claims: Sequence[Claim]
    unchecked: str = ""  # claims that cannot be checked here, and why


def nbytes(model: str) -> int:
    """Return the size of a model in bytes."""
    return 4 * PARAMETERS[model]


def ring_s(model: str, workers: int, bits_per_s: float) -> float:
    """Return K, the seconds of a ring all-reduce of the model."""
    return limits.ring_s(nbytes(model), workers, bits_per_s / 8)


def server_s(model: str, workers: int, bits_per_s: float) -> float:
    """Return K at a server with one NIC: the seconds to receive all pushes, while pulls are sent."""
    return nbytes(model) * workers * 8 / bits_per_s
