"""One training: its settings, and the files by which its processes know of each other."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import offbeat

HOSTS = 4
WORKERS = 8
BATCH = 32
TIMEOUT_S = 30.0
LR = 0.05
LEAST = 0.01  # of the learning rate, at the end
# Seconds of a step. The rest of a step is asleep, so that the machine's cores are not the limit: a step that
# sends and receives the model costs several times the computing of one that does not.
PACES_S = {"selsync": 0.25, "ssp": 0.5, "oscars": 0.5}
PACE_S = 0.1
STRATEGIES: dict[str, Any] = {
    "local_sgd": offbeat.LocalSGD(period=8),
    "diloco": offbeat.DiLoCo(period=16),
    "selsync": offbeat.SelSync(),
    "ssp": offbeat.SSP(staleness=3),
    "oscars": offbeat.Oscars(tau=4),
}
ALL = {"bsp": offbeat.BSP(), **STRATEGIES}  # those of the benchmark kills, too
ELASTIC = ("bsp", "local_sgd", "diloco", "selsync")
PEERS = ("torchft_local_sgd", "torchft_diloco")  # of torchft, with the settings of ours


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, as all of its processes know it."""

    strategy: str
    address: str  # of the server, of the elastic workers' store, or of the peers' lighthouse
    data: str
    folder: str  # for the files below
    pace: float = 0.0  # seconds of a step; 0: by the strategy

    @property
    def elastic(self) -> bool:
        return self.strategy in ELASTIC

    @property
    def peer(self) -> bool:
        return self.strategy in PEERS

    @property
    def served(self) -> bool:
        """True if the training has a parameter server."""
        return not self.elastic and not self.peer

    @property
    def pace_s(self) -> float:
        return self.pace or PACES_S.get(self.strategy, PACE_S)

    def log(self, slot: int) -> Path:
        """Return the file with a line for each event of a worker: its time, its name, and a clock."""
        return Path(self.folder) / f"events-{slot}"

    def result(self, slot: int) -> Path:
        """Return the file with a worker's final accuracy."""
        return Path(self.folder) / f"result-{slot}"

    @property
    def progress(self) -> Path:
        """The file that says which fraction of the samples all workers have trained, and their pace."""
        return Path(self.folder) / "progress"

    @property
    def stop(self) -> Path:
        """The file that ends the training; elastic workers end together, at the clock in it."""
        return Path(self.folder) / "stop"

    def is_over(self, clock: int) -> bool:
        return self.stop.exists() and (not self.elastic or clock >= int(self.stop.read_text() or 0))

    def read_progress(self) -> tuple[float, float]:
        """Return the fraction of the samples that all have trained, and the seconds of a step."""
        if not self.progress.exists():
            return 0.0, self.pace_s
        fraction, pace_s = map(float, self.progress.read_text().split())
        return fraction, pace_s

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Event:
    """Something that a worker did, or that was done to it: `killed`, `started`, `admitted` or `step`."""

    at_s: float
    name: str
    clock: int = 0

    def line(self) -> str:
        return f"{self.at_s:.3f} {self.name} {self.clock}\n"


class Events:
    """The events of all workers, read from their logs as these grow."""

    def __init__(self, job: Job) -> None:
        self.of: dict[int, list[Event]] = {slot: [] for slot in range(WORKERS)}
        self._job = job
        self._read: Counter[int] = Counter()  # bytes, by slot
        self.steps = 0  # of all workers

    def update(self) -> None:
        """Read what is new."""
        for slot, events in self.of.items():
            path = self._job.log(slot)
            if not path.exists():
                continue
            with path.open("rb") as log:
                log.seek(self._read[slot])
                whole = log.read().rpartition(b"\n")[0]
            for line in whole.split(b"\n") if whole else ():
                at_s, name, clock = line.decode().split()
                events.append(Event(float(at_s), name, int(clock)))
                self.steps += name == "step"
            self._read[slot] += len(whole) + bool(whole)

    def latest_step(self, slot: int) -> Event:
        """Return a worker's latest step; one long ago if there is none."""
        steps = (event for event in reversed(self.of[slot]) if event.name == "step")
        return next(steps, Event(0.0, "step"))

    def samples_per_s(self, began_s: float, ended_s: float) -> float:
        """Return the samples per second of all workers in a span of time."""
        steps = [event for events in self.of.values() for event in events if event.name == "step"]
        return BATCH * sum(began_s <= step.at_s < ended_s for step in steps) / (ended_s - began_s)


def write_whole(path: Path, text: str) -> None:
    """Write a file that others see only when it is whole."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
