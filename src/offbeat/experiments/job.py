"""The settings of one training run: what to train, with which strategy, how many workers, for how long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from offbeat.core.settings import lookup
from offbeat.core.strategy import Strategy
from offbeat.data.batching import batches, steps_per_epoch
from offbeat.data.injection import check_fractions
from offbeat.data.partition import label_skew
from offbeat.data.samplers import SAMPLERS
from offbeat.errors import SettingError
from offbeat.experiments.tasks import Data, Task

SHUFFLED = "shuffled"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run: task, strategy, number of workers, length. Fields that are None come from the task."""

    task: Task
    strategy: Strategy[Any]
    workers: int
    seed: int = 0
    epochs: int | None = None
    steps: int | None = None
    evaluate_every: int | None = None  # steps; None: once per epoch
    target: float | None = None
    order: str = SHUFFLED  # which worker draws which samples: all reshuffled per epoch, or by a sampler
    skew: int | None = None  # classes per worker's chunk; None: chunks are random
    inject: tuple[float, float] | None = None  # α and β of data injection

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "steps", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name}={value}: at least 1 is needed")

        if self.target is not None and not math.isfinite(self.target):
            raise SettingError(f"target={self.target}: a finite number is needed")
        if abs(self.seed) >= 1 << 63:
            raise SettingError(f"seed={self.seed}: a number of at most 63 bits is needed")
        lookup("order", self.order, {SHUFFLED: None, **SAMPLERS})
        if self.skew is not None and self.order == SHUFFLED:
            raise SettingError("skewed chunks need a data order that has chunks: seldp or defdp")
        if self.inject is not None:
            check_fractions(*self.inject)

    def total_steps(self, samples: int) -> int:
        """Compute the number of steps per worker, given the number of training samples."""
        epochs = self.epochs or self.task.epochs
        return self.steps or epochs * steps_per_epoch(samples, self.workers, self.task.batch_size)

    def with_epoch(self, samples: int) -> Job:
        """Return a copy of the job whose strategy knows how many steps an epoch has."""
        steps = steps_per_epoch(samples, self.workers, self.task.batch_size)
        return replace(self, strategy=self.strategy.with_epoch(steps))

    def batches(self, data: Data, rank: int, batch_size: int) -> Iterator[Tensor]:
        """Yield the sample indices of one worker's batches, without end."""
        if self.inject is not None and data.lengths is not None:
            raise SettingError(
                f"{self.task.name} has samples of different lengths, which data injection cannot mix"
            )
        if self.order == SHUFFLED:
            return batches(len(data), rank, self.workers, batch_size, self.seed, data.lengths)
        chunks = None
        if self.skew is not None:
            if data.labels is None:
                raise SettingError(f"{self.task.name} has no classes to skew its samples by")
            chunks = label_skew(data.labels, self.workers, self.skew, self.seed)
        sampler = SAMPLERS[self.order](data, rank, self.workers, self.seed, chunks)
        return sampler.batches(batch_size, data.lengths)
