"""Does training stay fast and right while everything fails?

    python -m benchmarks run chaos [--minutes 60] [--strategies local_sgd,ssp] [--peers FOLDER/bin/python]

Eight workers on four emulated hosts train Fashion-MNIST; elastic strategies meet in a store, strategies with
a server have a shard on each host, with copies. A worker is killed every 5 s and started again by its host's
launcher, a shard is killed every minute, a host is cut off for 10 s every 5 minutes (not that of the store),
the disk of the snapshots is full for 8 s now and then, and a stranger sends malformed frames to all ports of
the server (of elastic workers: to the store's port; gloo's own are not protected, see docs/security.md).
In shorter runs what is rarer comes sooner, and a host is cut off for a shorter time.

Steps are paced by sleeping, so that the machine's cores are not the limit: a quarter to half a second where
most steps send the model, a tenth elsewhere. A launcher is a warm parent, from which workers are forked: it
has imported torch and has the data, as a container that is kept for the next worker would.

`--minutes` are those of the disturbed runs together; `--strategies ssp --minutes 12` is one fifth of an hour
for one strategy. Undisturbed samples per second are taken over 2 minutes. Both runs then go on, undisturbed
and five times faster, until they have trained as many samples as the disturbed time has at full pace, so that
their accuracies compare. Finished parts are kept among the raw results and not run again, unless `--again`.

torchft's LocalSGD and DiLoCo have the same hosts, kills, pace and task, if `--peers` names the interpreter of
an environment that `python -m benchmarks.peers.environment FOLDER` has made. Its lighthouse, on the first
host, looks for lost replicas more often than by default.

Goals: at least 0.90 of the undisturbed samples per second, accuracy within 0.3 points, no acknowledged update
lost, no hang, no growth of memory. All seconds are medians. The others' pause is how much longer than usual
their longest step was within 4 s of a worker's death, or 16 s of a shard's.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.job import ELASTIC, HOSTS, PEERS, STRATEGIES, Job
from benchmarks.chaos.launcher import HostLauncher
from benchmarks.chaos.run import CALM_S, run_one
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import Table

RATE = "1gbit"
NAMES = (*STRATEGIES, *PEERS)
COLUMNS = (
    "strategy",
    "samples/s undisturbed",
    "disturbed",
    "fraction (goal ≥ 0.90)",
    "accuracy undisturbed",
    "difference in points (goal ≥ -0.3)",
    "updates lost (goal 0)",
    "hangs (goal 0)",
    "s from death to: launched, admitted, first step",
    "others' pause after a worker's, a shard's death in s",
    "growth of shards, workers, their keepers in MB",
    "killed workers, shards; cuts, full disks, knocks",
    "cores idle undisturbed, disturbed",
)


def row(strategy: str, calm: dict[str, Any] | None, rough: dict[str, Any] | None) -> list[str]:
    """Return what a strategy came to, as far as it was run."""
    if calm is None or rough is None or "error" in (calm | rough):
        errors = [str(part["error"]) for part in (calm, rough) if part and "error" in part]
        rate = f"{calm['samples_per_s']:.0f}" if calm and "error" not in calm else "–"
        return [strategy, rate, errors[0] if errors else "not run", *["–"] * (len(COLUMNS) - 3)]
    workers, shards, cuts, fills = rough["killed"]
    return [
        strategy,
        f"{calm['samples_per_s']:.0f}",
        f"{rough['samples_per_s']:.0f}",
        f"{rough['samples_per_s'] / max(calm['samples_per_s'], 1e-9):.3f}",
        f"{100 * calm['accuracy']:.2f}%",
        f"{100 * (rough['accuracy'] - calm['accuracy']):+.2f}",
        "–" if strategy in (*ELASTIC, *PEERS) else str(rough["lost"]),
        f"{rough['hangs']} ({calm['hangs']} undisturbed)",
        ", ".join(map(_seconds, rough["returned_s"].values())),
        f"{_seconds(rough['paused_s'])}, {_seconds(rough['paused_by_shard_s'])}",
        ", ".join(f"{grown:.1f}" for grown in rough["grown_mb"]),
        f"{workers}, {shards}; {cuts}, {fills}, {rough['knocks']}",
        f"{calm['idle']:.0%}, {rough['idle']:.0%}",
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def write_table(raw: RawResults) -> None:
    """Write all that was kept; a strategy has a row once one of its runs has ended."""
    table = Table("chaos", __doc__ or "", COLUMNS)
    for name in NAMES:
        calm, rough = (raw.get(f"{name} {kind}") for kind in ("calm", "rough"))
        if calm or rough:
            seconds = (rough or calm)["seconds"]
            table.note(
                f"{name}: {seconds:.0f} s disturbed; undisturbed over {min(CALM_S, seconds):.0f} s; trained "
                f"{(rough or calm).get('samples', 0):,} samples"
            )
            table.row(*row(name, calm, rough))
    table.write()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("chaos", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the disturbed runs together")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, with commas")
    parser.add_argument("--peers", help="interpreter of an environment that has torchft")
    parser.add_argument("--again", action="store_true", help="run kept parts again")
    parser.add_argument("--logs", type=Path, help="folder in which to leave the logs of all processes")
    parser.add_argument("--launcher", help=argparse.SUPPRESS)
    add_data_option(parser)
    options = parser.parse_args(arguments)
    if options.launcher:
        HostLauncher(Job(**json.loads(options.launcher))).run()
        return
    data = require_data(parser, options)
    names = options.strategies.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"unknown strategy {unknown[0]!r}; there are {', '.join(NAMES)}")
    if not options.peers and any(name in PEERS for name in names):
        parser.error("torchft needs an environment of its own: give --peers FOLDER/bin/python")
    seconds = 60 * options.minutes / len(names)
    raw = RawResults("chaos")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leave nothing behind
    with Hosts(count=HOSTS + 1, rate=RATE) as hosts:  # the last one is the stranger's
        try:
            for name in names:
                python = options.peers if name in PEERS else sys.executable
                where = (data, python, options.logs)
                for kind in ("calm", "rough"):
                    part = f"{name} {kind}"
                    kept = raw.get(part)
                    if kept is None or kept["seconds"] != seconds or options.again:
                        raw.keep(part, run_one(hosts, name, seconds, kind == "rough", *where))
                    write_table(raw)
        except KeyboardInterrupt:
            print(f"interrupted during {name}; finished parts are kept", flush=True)
            write_table(raw)
