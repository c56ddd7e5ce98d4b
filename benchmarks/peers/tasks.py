"""What is trained, to which value, for how long: the tasks of the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.cases import STRAGGLER
from offbeat.tasks import Data, Task, task
from offbeat.tasks.language import Text

HOSTS = 4
SLOWNESS = (1.0, 1.0, 1.0, 4.0)  # of the ranks, where one is a straggler


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Limits are seconds of training, by rate; whoever is not done by then is cut short."""

    name: str
    task: Task
    target: float
    epochs: float
    look_every: int
    search_from: int = 0  # steps before which a search does not look: nobody is at the target as early
    search_limit_s: float = 25.0  # of a try
    shorter: int = 1  # so many times are local phases, in the settings that are tried
    pace_s: float  # of a step, where workers differ in speed: no worker takes less
    limits_s: Mapping[str, float] = field(default_factory=dict)
    test_tokens: int | None = None  # of a text: to evaluate on its beginning only, for that takes long

    def load(self, folder: Path | None) -> Data:
        data = self.task.load(folder)
        if self.test_tokens is not None and isinstance(data, Text):
            data.test = data.test[: self.test_tokens]
        return data

    @property
    def batch_size(self) -> int:
        return self.task.batch_size

    def is_there(self, value: float) -> bool:
        sign = 1 if self.task.higher_is_better else -1
        return sign * value >= sign * self.target

    def slowness(self, workers: str, rank: int) -> float | None:
        """None: as fast as this machine is."""
        return SLOWNESS[rank] if workers == STRAGGLER else None


_ALL = (
    Setting(
        name="fashion-mnist/mlp",
        task=task("fashion-mnist", model="mlp", batch_size=32),
        target=0.87,
        epochs=4,
        look_every=50,
        search_from=500,
        pace_s=0.01,
        limits_s={"1gbit": 90.0, "200mbit": 30.0, "50mbit": 30.0},
    ),
    Setting(
        name="mnist/lenet5",
        task=task("mnist", model="lenet5", batch_size=32),
        target=0.985,
        epochs=3,
        look_every=100,
        pace_s=0.02,
        limits_s={"1gbit": 40.0, "200mbit": 40.0, "50mbit": 40.0},
    ),
    Setting(
        name="shakespeare/gpt",
        # A step of 16 windows of 128 takes 0.45 s here, four workers on two cores: too long for a table.
        task=task("shakespeare", batch_size=4, context=64),
        target=3.2,
        epochs=0.6,
        look_every=50,
        search_from=300,
        search_limit_s=45.0,
        shorter=4,  # 588 steps are all there are
        pace_s=0.1,
        limits_s={"1gbit": 75.0, "200mbit": 75.0, "50mbit": 75.0},
        test_tokens=16_384,
    ),
)
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _ALL}
