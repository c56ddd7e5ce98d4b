"""One run: a training on the emulated hosts, and what is done to it meanwhile."""

from __future__ import annotations

import math
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.cluster import TCP_PORT, Cluster
from benchmarks.chaos.job import BATCH, HOSTS, WORKERS, Job
from benchmarks.chaos.stranger import Stranger
from benchmarks.support.hosts import Hosts
from benchmarks.support.idle import cores, idle_s

CALM_S = 120.0  # over which undisturbed samples per second are taken
KILL_EVERY_S = 5.0
SHARD_EVERY_S = 60.0
CUT_EVERY_S, CUT_S, SHORTEST_CUT_S = 300.0, 10.0, 3.0
FILL_EVERY_S, FULL_S = 90.0, 8.0
NOTE_EVERY_S = 5.0
SAY_EVERY_S = 15.0
LOOK_S = 0.2
FASTER = 5.0  # at which the rest of the samples is trained, after the measured time
REST = 4.0  # times the measured seconds, after which the rest of the samples is given up


class Repeated:
    """Something that is due every so many seconds."""

    def __init__(self, every_s: float, began_s: float) -> None:
        self._every_s, self._next_s = every_s, began_s + every_s

    def due(self, now_s: float) -> bool:
        if now_s < self._next_s:
            return False
        while self._next_s <= now_s:
            self._next_s += self._every_s
        return True


def run_one(
    hosts: Hosts, strategy: str, seconds: float, disturbed: bool, data: Path, python: str, logs: Path | None
) -> dict[str, Any]:
    """Train once, measured from the moment when all workers have taken a step; return the outcome."""
    folder = tempfile.mkdtemp()
    try:
        address = f"{hosts.address(0)}:{TCP_PORT}"
        job = Job(strategy=strategy, address=address, data=str(data), folder=folder)
        samples = int(seconds / job.pace_s) * BATCH * WORKERS
        with Cluster(hosts, job, python) as cluster:
            watch = Watch(cluster, samples, "disturbed" if disturbed else "undisturbed")
            outcome: dict[str, Any] = {"seconds": seconds, "samples": samples, "knocks": 0}
            outcome |= _measure(hosts, cluster, watch, seconds, disturbed)
            watch.finish_samples(seconds * REST)
            accuracies = cluster.finish()
            accuracy = statistics.mean(accuracies) if accuracies else math.nan
            return outcome | cluster.outcome() | {"accuracy": accuracy}
    except TimeoutError as never:  # to the start of the training
        if not job.peer:
            raise
        return {"seconds": seconds, "error": " ".join(str(never).split())[-300:]}
    finally:
        if logs is not None:
            kept = logs / f"{strategy}-{'rough' if disturbed else 'calm'}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _measure(hosts: Hosts, cluster: Cluster, watch: Watch, seconds: float, disturbed: bool) -> dict[str, Any]:
    if not disturbed:
        return watch.measure(min(CALM_S, seconds), None)
    only = None if cluster.job.served else TCP_PORT
    stranger = Stranger(hosts, HOSTS, range(HOSTS), only)
    try:
        measured = watch.measure(seconds, Disturbance(cluster, seconds))
    finally:
        stranger.end()
    return measured | {"knocks": stranger.knocks}


class Watch:
    """The command's view of a running training: it tells the workers their progress, and says how it goes."""

    def __init__(self, cluster: Cluster, samples: float, kind: str) -> None:
        self._cluster, self._samples, self._kind = cluster, samples, kind
        self._pace_s = cluster.job.pace_s

    @property
    def fraction(self) -> float:
        return BATCH * self._cluster.events.steps / self._samples

    def measure(self, seconds: float, disturbance: Disturbance | None) -> dict[str, Any]:
        """Let the training run for so many seconds; return its samples per second and the idle cores."""
        began_s, idle = time.time(), idle_s()
        self._run(seconds, disturbance, until_trained=False)
        ended_s = time.time()
        self._cluster.events.update()
        return {
            "samples_per_s": self._cluster.events.samples_per_s(began_s, ended_s),
            "idle": (idle_s() - idle) / (ended_s - began_s) / cores(),
        }

    def finish_samples(self, most_s: float) -> None:
        """Train the rest of the samples, faster."""
        self._pace_s /= FASTER
        self._kind = "the rest"
        self._run(most_s, None, until_trained=True)

    def _run(self, seconds: float, disturbance: Disturbance | None, until_trained: bool) -> None:
        cluster, began_s = self._cluster, time.time()
        note, say = Repeated(NOTE_EVERY_S, began_s), Repeated(SAY_EVERY_S, began_s)
        while (now_s := time.time()) < began_s + seconds:
            time.sleep(LOOK_S)
            cluster.events.update()
            cluster.set_progress(self.fraction, self._pace_s)
            if until_trained and self.fraction >= 1:
                break
            if disturbance is not None:
                disturbance.go_on(now_s)
            if note.due(now_s):
                cluster.note_memory()
                cluster.end_hangs()
            if say.due(now_s):
                self._say(now_s - began_s, seconds, now_s)
        if disturbance is not None:
            disturbance.end()

    def _say(self, passed_s: float, seconds: float, now_s: float) -> None:
        rate = self._cluster.events.samples_per_s(now_s - SAY_EVERY_S, now_s)
        said = f"{self._cluster.job.strategy}, {self._kind}: {passed_s:.0f} of {seconds:.0f} s, "
        print(f"{said}{self.fraction:.0%} of the samples, {rate:.0f} samples/s", flush=True)


class Disturbance:
    """Everything that fails, when it is due."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        now_s = time.time()
        self._cluster, self._rng = cluster, random.Random(0)
        cut_every_s = min(CUT_EVERY_S, seconds / 1.6)
        self._cut_s = max(SHORTEST_CUT_S, CUT_S * cut_every_s / CUT_EVERY_S)
        self._kill = Repeated(KILL_EVERY_S, now_s)
        self._shard = Repeated(min(SHARD_EVERY_S, seconds / 2.5), now_s)
        self._cut = Repeated(cut_every_s, now_s)
        self._fill = Repeated(min(FILL_EVERY_S, seconds / 3), now_s)
        self._cut_host, self._up_s, self._free_s = 0, 0.0, 0.0

    def go_on(self, now_s: float) -> None:
        """Break what is due, and mend what has been broken for long enough."""
        cluster, rng = self._cluster, self._rng
        if self._kill.due(now_s):
            cluster.kill_worker(rng.randrange(WORKERS))
        if cluster.job.served and self._shard.due(now_s) and not self._up_s:
            cluster.kill_shard(rng.randrange(HOSTS))
        if cluster.job.served and self._fill.due(now_s):
            cluster.fill_disk()
            self._free_s = now_s + FULL_S
        if self._cut.due(now_s):
            self._cut_host, self._up_s = rng.randrange(1, HOSTS), now_s + self._cut_s
            cluster.cut_off(self._cut_host)
        if self._up_s and now_s > self._up_s:
            self._up_s = 0.0
            cluster.reconnect(self._cut_host)
        if self._free_s and now_s > self._free_s:
            self._free_s = 0.0
            cluster.free_disk()

    def end(self) -> None:
        """Mend all that is broken."""
        self._cluster.free_disk()
        if self._up_s:
            self._cluster.reconnect(self._cut_host)
