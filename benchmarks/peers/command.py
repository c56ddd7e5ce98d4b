"""How does Offbeat compare with torch, torchft and Accelerate?

    python -m benchmarks run peers --data FOLDER --out FOLDER --search

Every contender trains the same task on the same four emulated hosts, with the same loop, data order, seeds
and clock. Seconds are those of training, without evaluation; MB are those sent by all hosts. `--search` first
tries the settings of each contender at each rate, with equal workers. docs/peers.md describes the method.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.peers import launch
from benchmarks.peers.cases import CPU, CUDA, EQUAL, FAILED, ROW, SEARCH, STRAGGLER, Cache, Case, Outcome
from benchmarks.peers.chart import write_chart
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.results import GOAL_TASK, Row, best_settings, cells, goals, seconds_to_target, tables
from benchmarks.peers.tasks import HOSTS, TASKS, PeerTask
from benchmarks.peers.worker import work
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import command_line, machine
from offbeat.core.settings import lookup
from offbeat.errors import OffbeatError
from offbeat.experiments.tasks import Data

START_S = 5.0  # to start, evaluate and end a case
OVERHEAD_S = 90.0  # beyond its limit, after which a case has failed
CUT_AT = 1.25  # a try is cut short after this many times the seconds of the best try so far


def installed(name: str) -> bool:
    """Return whether a contender's library is installed."""
    return importlib.util.find_spec(CONTENDERS[name].needs) is not None


class Comparison:
    """Cases of one command line; runs those that are not cached yet."""

    def __init__(self, options: argparse.Namespace, cache: Cache) -> None:
        self.options, self.cache = options, cache
        self.data: dict[str, Data] = {}
        self.began = time.monotonic()

    def peer_task(self, task: str) -> PeerTask:
        """Return a task, with the epochs of the command line."""
        peer_task = TASKS[task]
        return replace(peer_task, epochs=self.options.epochs or peer_task.epochs)

    def limit_s(self, case: Case) -> float:
        """Return the seconds after which a training is cut short."""
        return self.options.limit_s or TASKS[case.task].limits_s.get(case.rate, 90.0)

    def rows(self, task: str, rate: str, workers: str) -> Iterator[Case]:
        """Yield the case of each contender, with the best settings found so far."""
        for name in self.options.only:
            case = Case(
                task=task,
                rate=rate,
                workers=workers,
                contender=name,
                seed=self.options.seed,
                purpose=ROW,
                epochs=self.peer_task(task).epochs,
                device=self.options.device,
            )
            yield replace(case, settings=best_settings(self.cache, case))

    def run(self, hosts: Hosts) -> None:
        """Run all searches and rows."""
        for task, workers, rate in self.combinations():
            hosts.set_rate(rate)
            if self.options.search and workers == EQUAL:
                self.search(hosts, task, rate)
            for case in self.rows(task, rate, workers) if not self.options.search_only else ():
                self.measure(hosts, case, self.limit_s(case))

    def combinations(self) -> Iterator[tuple[str, str, str]]:
        """Yield task, workers and rate in the order in which they run."""
        return product(self.options.tasks, self.options.workers, self.options.rates)

    def search(self, hosts: Hosts, task: str, rate: str) -> None:
        """Try all settings of every contender that has several.

        A try that is much slower than the best so far is cut short. One that is a little slower may still be
        the fastest with other seeds.
        """
        for row in self.rows(task, rate, EQUAL):
            limit_s = min(TASKS[task].search_limit_s, self.limit_s(row))
            for settings in self.tries(row):
                outcome = self.measure(hosts, replace(row, settings=settings, purpose=SEARCH), limit_s)
                limit_s = min(limit_s, CUT_AT * seconds_to_target(outcome))

    @staticmethod
    def tries(case: Case) -> Sequence[Mapping[str, Any]]:
        """Return the settings to search; none for a contender with a single setting."""
        tries = CONTENDERS[case.contender].tries_for(TASKS[case.task].period_divisor)
        return tries if len(tries) > 1 else ()

    def measure(self, hosts: Hosts, case: Case, limit_s: float) -> Outcome:
        """Return the outcome of a case, from the cache or from a run."""
        outcome = self.cache.get(case)
        if outcome is not None and not (outcome.ended == FAILED and self.options.again):
            return outcome
        peer_task, data = self.peer_task(case.task), self.load(case.task)
        if not any(f"({case.rate})" in note for note in self.cache.notes):
            self.cache.note(hosts.describe_link())
        began = time.monotonic()
        try:
            outcome = launch.run(hosts, partial(work, case, peer_task, data, limit_s), limit_s + OVERHEAD_S)
        except launch.CaseFailed as failure:
            outcome = Outcome(case=case, ended=FAILED, failure=str(failure), limit_s=limit_s)
        assert isinstance(outcome, Outcome)
        self.cache.add(outcome)
        took = time.monotonic() - began
        shown = cells(Row((outcome,)))
        print(
            f"[{time.monotonic() - self.began:5.0f} s] {case.purpose} {case}: {shown[5]} s to target,"
            f" final {shown[6]}, {shown[9]} ms per step, {shown[11]} (took {took:.0f} s)",
            flush=True,
        )
        return outcome

    def load(self, task: str) -> Data:
        """Load a task's data once."""
        if task not in self.data:
            self.data[task] = TASKS[task].load(self.options.data)
        return self.data[task]

    def estimate(self) -> str:
        """Describe the cases left to run, and the longest time they may take."""
        most_s = []
        for task, workers, rate in self.combinations():
            for case in self.rows(task, rate, workers):
                if not self.options.search_only and self.cache.get(case) is None:
                    most_s.append(self.limit_s(case))
                if self.options.search and workers == EQUAL:
                    tries = [replace(case, settings=tried, purpose=SEARCH) for tried in self.tries(case)]
                    most_s += [TASKS[task].search_limit_s for tried in tries if self.cache.get(tried) is None]
        minutes = (sum(most_s) + START_S * len(most_s)) / 60
        return f"{len(most_s)} cases to run, {minutes:.0f} minutes at most"


def split_list(text: str) -> list[str]:
    """Split a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; leave out contenders whose libraries are missing."""
    parser = benchmark_parser("peers", __doc__)
    add_data_option(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cache, not in the repository")
    parser.add_argument("--tasks", type=split_list, default=[GOAL_TASK], help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--rates", type=split_list, default=["1gbit", "200mbit", "50mbit"])
    parser.add_argument("--only", type=split_list, default=list(CONTENDERS), help="only these contenders")
    parser.add_argument("--not", dest="leave", type=split_list, default=[], help="not these contenders")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--equal", dest="workers", action="store_const", const=[EQUAL], help="no straggler")
    which.add_argument("--straggler", dest="workers", action="store_const", const=[STRAGGLER])
    parser.add_argument("--search", action="store_true", help="first search each contender's settings")
    parser.add_argument("--search-only", action="store_true", help="search and nothing else")
    parser.add_argument("--again", action="store_true", help="run failed cases again")
    parser.add_argument("--table", action="store_true", help="run nothing, write the tables")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="with --table: also draw a chart, as SVG"
    )
    parser.add_argument("--epochs", type=float, help="instead of the task's")
    parser.add_argument("--limit-s", type=float, help="seconds of training, instead of the task's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", choices=[CPU, CUDA], default=CPU, help="where models train; cuda: all workers share a GPU"
    )
    options = parser.parse_args(arguments)
    options.workers = options.workers or [EQUAL, STRAGGLER]
    options.search = options.search or options.search_only
    try:
        for task in options.tasks:
            lookup("task", task, TASKS)
        for name in [*options.only, *options.leave]:
            lookup("contender", name, CONTENDERS)
    except OffbeatError as error:
        parser.error(str(error))
    if not options.table:
        require_data(parser, options)
    options.only = [name for name in CONTENDERS if name in options.only and name not in options.leave]
    missing = [name for name in options.only if not installed(name)]
    if missing and not options.table:
        print(f"left out, libraries not installed: {', '.join(missing)}", file=sys.stderr)
        options.only = [name for name in options.only if name not in missing]
    return options


def describe_run(arguments: Sequence[str]) -> list[str]:
    """Return the notes above the tables: command, libraries and machine."""
    libraries = sorted({contender.needs for contender in CONTENDERS.values()})
    versions = [f"{name} {version(name)}" for name in libraries if importlib.util.find_spec(name)]
    return [
        f"run by `{command_line(arguments)}`",
        f"libraries: {', '.join(versions)}",
        f"machine: {machine()}",
    ]


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    torch.set_num_threads(1)  # a process with threads must not be forked
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports a lot: once here, not in every case
    cache = Cache(options.out, options.device)
    comparison = Comparison(options, cache)
    if not options.table:
        print(comparison.estimate(), flush=True)
        for note in describe_run(sys.argv[1:]):
            if note not in cache.notes:
                cache.note(note)
        try:
            with Hosts(count=HOSTS, rate=options.rates[0]) as hosts:
                comparison.run(hosts)
        except KeyboardInterrupt:
            print(
                f"stopped; finished cases are in {cache.path}, the same command continues",
                file=sys.stderr,
            )
            return 130
        for goal in goals(cache):
            print(goal)
        return 0
    written = tables(cache, __doc__ or "")
    for table in written:
        table.write()
    if options.picture:
        write_chart(written[0].rows, options.picture)
    return 0
