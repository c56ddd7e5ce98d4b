"""Tasks of the comparison: model, target, length and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.cases import STRAGGLER
from offbeat.experiments.tasks import Data, Task, task
from offbeat.experiments.tasks.language import TextData

HOSTS = 4
SLOWNESS = (1.0, 1.0, 1.0, 4.0)  # by rank, with a straggler


@dataclass(frozen=True, kw_only=True)
class PeerTask:
    """A task with its target; a training longer than the limit of its rate is cut short."""

    name: str
    task: Task
    target: float
    epochs: float
    evaluate_every: int  # steps
    search_from: int = 0  # step of a search's first evaluation: no contender reaches the target earlier
    search_limit_s: float = 25.0  # per try
    period_divisor: int = 1  # of the periods and delays that are tried
    pace_s: float  # computation time per step of the fast workers, with a straggler
    limits_s: Mapping[str, float] = field(default_factory=dict)  # by rate
    test_tokens: int | None = None  # evaluate a text on its first tokens only, because that takes long

    def load(self, folder: Path | None) -> Data:
        """Load the data, with a test text cut to `test_tokens`."""
        data = self.task.load(folder)
        if self.test_tokens is not None and isinstance(data, TextData):
            data.test = data.test[: self.test_tokens]
        return data

    @property
    def batch_size(self) -> int:
        return self.task.batch_size

    def reached(self, value: float) -> bool:
        """Return whether a value meets the target."""
        sign = 1 if self.task.higher_is_better else -1
        return sign * value >= sign * self.target

    def slowness(self, workers: str, rank: int) -> float | None:
        """Return the rank's slowness with a straggler; None: not paced."""
        return SLOWNESS[rank] if workers == STRAGGLER else None


_ALL = (
    PeerTask(
        name="fashion-mnist/mlp",
        task=task("fashion-mnist", model="mlp", batch_size=32),
        target=0.87,
        epochs=4,
        evaluate_every=50,
        search_from=500,
        pace_s=0.01,
        limits_s={"1gbit": 90.0, "200mbit": 30.0, "50mbit": 30.0},
    ),
    PeerTask(
        name="mnist/lenet5",
        task=task("mnist", model="lenet5", batch_size=32),
        target=0.985,
        epochs=3,
        evaluate_every=100,
        pace_s=0.02,
        limits_s={"1gbit": 40.0, "200mbit": 40.0, "50mbit": 40.0},
    ),
    PeerTask(
        name="shakespeare/gpt",
        # With 16 windows of 128, a step of four workers on two cores takes 0.45 s: too long for a table.
        task=task("shakespeare", batch_size=4, context=64),
        target=3.2,
        epochs=0.6,
        evaluate_every=50,
        search_from=300,
        search_limit_s=45.0,
        period_divisor=4,  # there are only 588 steps
        pace_s=0.1,
        limits_s={"1gbit": 75.0, "200mbit": 75.0, "50mbit": 75.0},
        test_tokens=16_384,
    ),
)
TASKS: dict[str, PeerTask] = {peer_task.name: peer_task for peer_task in _ALL}
