"""The settings of one training run: what to train, with which strategy, how many workers, for how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from offbeat.core.elastic import check_elastic
from offbeat.core.fields import Choice, Instance, ListOf, Number, Text, Whole
from offbeat.core.settings import Settings, lookup
from offbeat.core.strategy import Strategy
from offbeat.data.batching import NumberedBatches, batches, steps_per_epoch
from offbeat.data.injection import FRACTION
from offbeat.data.partition import label_skew
from offbeat.data.samplers import SAMPLERS
from offbeat.errors import SettingError
from offbeat.experiments.schedule import SCHEDULES
from offbeat.experiments.tasks import Data, Task

SHUFFLED = "shuffled"
SHARED, EQUAL = "shared", "equal"
MOST = (1 << 63) - 1
SEED = "a whole number of at most 63 bits"


@dataclass(frozen=True, kw_only=True)
class Job(Settings):
    """A training run: task, strategy, number of workers, length. Fields that are None come from the task."""

    task: Annotated[Task, Instance("task to train", of=Task, noun="a Task")]
    strategy: Annotated[Strategy[Any], Instance("how workers synchronize", of=Strategy, noun="a Strategy")]
    workers: Annotated[int, Whole("number of workers", of="workers", at_least=1)]
    seed: Annotated[
        int, Whole("seed of weights, data order and noise", wording=SEED, at_least=-MOST, at_most=MOST)
    ] = 0
    epochs: Annotated[
        int | None, Whole("passes over the data; None: the task's default", of="epochs", at_least=1)
    ] = None
    steps: Annotated[
        int | None,
        Whole("steps of each worker, of shared work on average, instead of epochs", of="steps", at_least=1),
    ] = None
    evaluate_every: Annotated[
        int | None, Whole("steps from one evaluation to the next; None: an epoch", of="steps", at_least=1)
    ] = None
    schedule: Annotated[str, Choice("learning rate over the run", of=SCHEDULES)] = "constant"
    target: Annotated[
        float | None, Number("value of the metric to reach; its time is recorded", noun="a finite number")
    ] = None
    order: Annotated[
        str, Text("how samples are distributed to workers: shuffled in each epoch, or by a sampler")
    ] = SHUFFLED
    skew: Annotated[
        int | None, Whole("classes in a worker's chunk; None: chunks are random", of="classes", at_least=1)
    ] = None
    inject: Annotated[
        tuple[float, float] | None,
        ListOf(
            "α and β of data injection",
            item=FRACTION,
            names=("alpha", "beta"),
            noun="two fractions, such as (0.5, 0.5)",
        ),
    ] = None

    work: Annotated[
        str | None,
        Choice(
            "whether workers share all batches, or each has equally many; None: shared, unless the strategy "
            "moves in step or the data are divided among workers",
            of=(SHARED, EQUAL),
        ),
    ] = None

    @property
    def shares_work(self) -> bool:
        """True if workers claim their batches from all of them; False: each has equally many."""
        return self.work != EQUAL and not self._why_equal()

    def _why_equal(self) -> str:
        """Return why work cannot be shared, in words; empty: it can."""
        half = self.strategy.server_half()
        if half is None or half.in_step:
            return f"under {self.strategy.name} all workers do equally many steps"
        if self.order != SHUFFLED:
            return f"in the order {self.order} each worker draws from chunks of its own"
        return "workers that inject data do equally many steps" if self.inject is not None else ""

    def check(self) -> None:
        lookup("order", self.order, {SHUFFLED: None, **SAMPLERS})
        if self.work == SHARED and (reason := self._why_equal()):
            raise SettingError(f"work={SHARED} is not possible: {reason}. Choose {EQUAL}, or leave it out")
        if self.skew is not None and self.order == SHUFFLED:
            raise SettingError("skewed chunks need a data order that has chunks: seldp or defdp")

    def check_elastic(self, minimum: int) -> None:
        """Raise an error with the reason if workers of this job cannot be lost."""
        check_elastic(self.strategy, minimum)
        if self.inject is not None:
            raise SettingError("data injection sends samples from rank to rank: not with elastic workers")

    def total_steps(self, samples: int) -> int:
        """Compute the number of steps per worker, given the number of training samples."""
        epochs = self.epochs or self.task.epochs
        return self.steps or epochs * self.steps_per_epoch(samples)

    def steps_per_epoch(self, samples: int) -> int:
        """Return the steps of one worker per epoch."""
        needed = self.workers * self.task.batch_size
        if samples < needed and not self.task.shrinks_batches:
            raise SettingError(
                f"{self.workers} workers with batches of {self.task.batch_size} need {needed} samples, but "
                f"there are {samples}: take fewer workers or a smaller batch_size"
            )
        return steps_per_epoch(samples, self.workers, self.task.batch_size)

    def numbered_batches(self, data: Data) -> NumberedBatches:
        """Return the batches that workers share, by their numbers."""
        return NumberedBatches(len(data), self.workers, self.task.batch_size, self.seed, data.lengths)

    def batches(self, data: Data, rank: int, batch_size: int) -> Iterator[Tensor]:
        """Yield the sample indices of one worker's batches, without end."""
        if self.inject is not None and data.lengths is not None:
            raise SettingError(f"{self.task.name} has samples of different lengths, which cannot be injected")
        if self.order == SHUFFLED:
            return batches(len(data), rank, self.workers, batch_size, self.seed, data.lengths)
        chunks = None
        if self.skew is not None:
            if data.labels is None:
                raise SettingError(f"{self.task.name} has no classes to skew its samples by")
            chunks = label_skew(data.labels, self.workers, self.skew, self.seed)
        sampler = SAMPLERS[self.order](data, rank, self.workers, self.seed, chunks)
        return sampler.batches(batch_size, data.lengths)
