"""What a claim of a paper is made of: its source, the paper's figure, the runs that check it, our figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Outcome = dict[str, Any]  # summary.json's fields, and what `runs.perform` adds
Outcomes = Mapping[str, Sequence[Outcome]]  # by the name of the contender, one a seed
Mark = Literal["paper", "code", "abstract"]

# parameters of 4 bytes each, as docs/tasks.md has them; a test counts them
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
    """One run in virtual time. Its fields say all that its outcome depends on, so they are its name."""

    task: str
    model: str
    strategy: str
    settings: tuple[str, ...] = ()  # as after --set
    cluster: str
    step_s: float | None = None  # of the fastest group; the others keep their ratio to it. None: the preset's
    workers: int = 16
    steps: int
    batch_size: int
    lr: float | None = None
    seed: int = 0
    order: str = "shuffled"
    looks: int = 0  # evaluations; 0: only time is wanted, and nothing is evaluated

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def title(self) -> str:
        settings = f"({', '.join(self.settings)})" if self.settings else ""
        step = f" of {self.step_s:.3g} s" if self.step_s else ""
        what = f"{'trained' if self.looks else 'timed'} for {self.steps} steps{step}"
        return f"{self.model} {self.strategy}{settings}, {self.workers} workers, {what}, seed {self.seed}"

    def seeds(self, count: int) -> tuple[Run, ...]:
        return tuple(replace(self, seed=seed) for seed in range(count))

    def scaled(self, factor: float) -> Run:
        """Trained for another number of steps; timing stays as it is."""
        return replace(self, steps=max(self.looks, round(factor * self.steps))) if self.looks else self

    def quick(self) -> Run:
        """So small that nothing but the way through the code is shown: the same one for many."""
        return replace(self, steps=6, workers=4, batch_size=2, looks=0, step_s=None, seed=0)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the table."""

    claim: str
    mark: Mark  # where METHODS.md has it from
    figure: str  # the paper's; empty: the source says it in words only
    source: str = ""  # the words around that figure on the page of methods, as they are there
    runs: Mapping[str, tuple[Run, ...]]  # by contender; one a seed
    ours: Callable[[Outcomes], str]
    settings: str
    why: str  # it differs, or may


@dataclass(frozen=True, kw_only=True)
class Paper:
    name: str
    title: str
    claims: Sequence[Claim]
    unchecked: str = ""  # what of it cannot be checked here, and why


def nbytes(model: str) -> int:
    return 4 * PARAMETERS[model]


def ring_s(model: str, workers: int, bits_per_s: float) -> float:
    """K: seconds of a ring all-reduce of the model."""
    return 2 * nbytes(model) * (workers - 1) / workers * 8 / bits_per_s


def server_s(model: str, workers: int, bits_per_s: float) -> float:
    """K where one server's NIC takes in what all workers push; what they pull goes out meanwhile."""
    return nbytes(model) * workers * 8 / bits_per_s
