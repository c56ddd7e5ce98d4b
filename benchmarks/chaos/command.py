"""Does training stay fast and right while everything fails?

    python -m benchmarks run chaos [--minutes 60] [--strategies local_sgd,ssp]

Eight workers on four emulated hosts train Fashion-MNIST; elastic strategies meet in a store, strategies with
a server have a shard on each host, with copies. Each strategy trains undisturbed first, and then as long
disturbed: a worker is killed every 5 s and started again by its host's launcher, a shard is killed every
minute, a host is cut off for 10 s every 5 minutes (not that of the store), the disk of the snapshots is full
for 8 s now and then, and a stranger sends malformed frames to all ports of the server (of elastic workers: to
the store's port; gloo's own are not protected, see docs/security.md). In shorter runs everything but the
workers' deaths comes sooner. Computing is paced, so that the machine's cores are not the limit.

`--minutes` are those of the disturbed runs together. Goals: at least 0.90 of the undisturbed samples per
second, accuracy within 0.3 points, no acknowledged update lost, no hang, no growth of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.cluster import HOSTS, TCP_PORT, WORKERS, Cluster
from benchmarks.chaos.stranger import Stranger
from benchmarks.chaos.worker import STRATEGIES, HostLauncher, Job
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table

RATE = "1gbit"
KILL_EVERY_S = 5.0
SHARD_EVERY_S = 60.0
CUT_EVERY_S, CUT_S = 300.0, 10.0
FILL_EVERY_S, FULL_S = 90.0, 8.0
NOTE_EVERY_S = 5.0
SAY_EVERY_S = 15.0
COLUMNS = (
    "strategy",
    "samples/s undisturbed",
    "disturbed",
    "fraction (goal ≥ 0.90)",
    "accuracy undisturbed",
    "difference in points (goal ≥ -0.3)",
    "updates lost (goal 0)",
    "hangs (goal 0)",
    "growth of shards, workers in MB",
    "killed workers, shards; cuts, full disks, knocks",
)


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    samples_per_s: float
    accuracy: float  # nan if no worker reached the end
    cluster: Cluster
    knocks: int = 0


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


def run_one(hosts: Hosts, strategy: str, seconds: float, disturbed: bool, data: Path) -> Outcome:
    """Train once for so many seconds, from the moment when all workers have taken a step."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            strategy=strategy,
            address=f"{hosts.address(0)}:{TCP_PORT}",
            world=WORKERS,
            seconds=seconds,
            data=str(data),
            folder=folder,
        )
        with Cluster(hosts, job) as cluster:
            stranger = None
            if disturbed:
                only = TCP_PORT if job.elastic else None
                stranger = Stranger(hosts, HOSTS, range(HOSTS), only)
            began_s = time.time()
            try:
                disturb(cluster, seconds, disturbed)
                ended_s = time.time()
            finally:
                if stranger is not None:
                    stranger.end()
            rate = cluster.samples_per_s(began_s, ended_s)
            accuracies = cluster.finish()
            accuracy = statistics.mean(accuracies) if accuracies else float("nan")
            cluster.lost = cluster.lost_updates()
            return Outcome(rate, accuracy, cluster, stranger.knocks if stranger else 0)


def disturb(cluster: Cluster, seconds: float, disturbed: bool) -> None:
    """Let a training run for so many seconds; break what is due, and say how it goes."""
    rng, began_s = random.Random(0), time.time()
    kill = Repeated(KILL_EVERY_S, began_s)
    shard = Repeated(min(SHARD_EVERY_S, seconds / 2.5), began_s)
    cut = Repeated(min(CUT_EVERY_S, seconds / 1.6), began_s)
    fill = Repeated(min(FILL_EVERY_S, seconds / 3), began_s)
    note, say = Repeated(NOTE_EVERY_S, began_s), Repeated(SAY_EVERY_S, began_s)
    cut_host, up_s, free_s = 0, 0.0, 0.0
    while (now_s := time.time()) < began_s + seconds:
        time.sleep(0.2)
        if disturbed and kill.due(now_s):
            cluster.kill_worker(rng.randrange(WORKERS))
        if disturbed and not cluster.job.elastic and shard.due(now_s) and not up_s:
            cluster.kill_shard(rng.randrange(HOSTS))
        if disturbed and not cluster.job.elastic and fill.due(now_s):
            cluster.fill_disk()
            free_s = now_s + FULL_S
        if disturbed and cut.due(now_s):
            cut_host, up_s = rng.randrange(1, HOSTS), now_s + CUT_S
            cluster.cut_off(cut_host)
        if up_s and now_s > up_s:
            up_s = 0.0
            cluster.reconnect(cut_host)
        if free_s and now_s > free_s:
            free_s = 0.0
            cluster.free_disk()
        if note.due(now_s):
            cluster.note_memory()
            cluster.end_hangs()
        if say.due(now_s):
            rate = cluster.samples_per_s(now_s - SAY_EVERY_S, now_s)
            print(
                f"{cluster.job.strategy}, {'disturbed' if disturbed else 'undisturbed'}: "
                f"{now_s - began_s:.0f} of {seconds:.0f} s, {rate:.0f} samples/s, "
                f"{cluster.killed_workers} workers and {cluster.killed_shards} shards killed",
                flush=True,
            )
    cluster.free_disk()
    if up_s:
        cluster.reconnect(cut_host)


def add_row(table: Table, strategy: str, calm: Outcome, rough: Outcome) -> None:
    """Add what a strategy came to."""
    cluster = rough.cluster
    done = f"{cluster.killed_workers}, {cluster.killed_shards}; "
    done += f"{cluster.cuts}, {cluster.fills}, {rough.knocks}"
    table.row(
        strategy,
        f"{calm.samples_per_s:.0f}",
        f"{rough.samples_per_s:.0f}",
        f"{rough.samples_per_s / max(calm.samples_per_s, 1e-9):.3f}",
        f"{100 * calm.accuracy:.2f}%",
        f"{100 * (rough.accuracy - calm.accuracy):+.2f}",
        "–" if cluster.job.elastic else str(cluster.lost),
        f"{cluster.hangs} ({calm.cluster.hangs} undisturbed)",
        f"{cluster.growth_mb('shards'):.1f}, {cluster.growth_mb('workers'):.1f}",
        done,
    )


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("chaos", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the disturbed runs together")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, with commas")
    parser.add_argument("--launcher", help=argparse.SUPPRESS)
    add_data_option(parser)
    options = parser.parse_args(arguments)
    if options.launcher:
        HostLauncher(Job(**json.loads(options.launcher))).run()
        return
    data = require_data(parser, options)
    names = options.strategies.split(",")
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        parser.error(f"unknown strategy {unknown[0]!r}; there are {', '.join(STRATEGIES)}")
    seconds = 60 * options.minutes / len(names)
    table = Table("chaos", __doc__ or "", COLUMNS)
    table.note(f"{seconds:.0f} s undisturbed and {seconds:.0f} s disturbed for each strategy")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leave nothing behind
    with Hosts(count=HOSTS + 1, rate=RATE) as hosts:  # the last one is the stranger's
        try:
            for name in names:
                calm, rough = (run_one(hosts, name, seconds, disturbed, data) for disturbed in (False, True))
                add_row(table, name, calm, rough)
                table.write()
        except KeyboardInterrupt:
            table.note(f"interrupted during {name}")
            table.write()
