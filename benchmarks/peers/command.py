"""How do torch's, torchft's and Accelerate's ways of training compare with every strategy here?

    python -m benchmarks.peers --data FOLDER --out FOLDER --search

The same task on the same 4 shaped hosts by the same loop, data order, seeds and clock; seconds are those of
training, without evaluation; MB are what left all hosts' cards. `--search` first tries the settings of each
contender, at each rate, with equal workers. How it is measured: docs/peers.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
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

from benchmarks.hosts import Hosts
from benchmarks.peers import launch
from benchmarks.peers.cases import CPU, CUDA, EQUAL, FAILED, ROW, SEARCH, STRAGGLER, Cache, Case, Outcome
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.picture import draw
from benchmarks.peers.results import GOAL_TASK, Row, cells, found, goals, seconds, tables
from benchmarks.peers.setting import HOSTS, SETTINGS, Setting
from benchmarks.peers.worker import work
from benchmarks.tables import machine
from offbeat.errors import OffbeatError
from offbeat.settings import pick
from offbeat.tasks import Data

START_S = 5.0  # and to look, and to end
OVERHEAD_S = 90.0  # beyond its limit, until a case has failed
MUCH_LATER = 1.25  # times the best try so far: then a try is over


def installed(name: str) -> bool:
    return importlib.util.find_spec(CONTENDERS[name].needs) is not None


class Comparison:
    """Runs the cases that are not in the cache yet."""

    def __init__(self, options: argparse.Namespace, cache: Cache) -> None:
        self.options, self.cache = options, cache
        self.data: dict[str, Data] = {}
        self.began = time.monotonic()

    def setting(self, task: str) -> Setting:
        setting = SETTINGS[task]
        return replace(setting, epochs=self.options.epochs or setting.epochs)

    def limit_s(self, case: Case) -> float:
        return self.options.limit_s or SETTINGS[case.task].limits_s.get(case.rate, 90.0)

    def rows(self, task: str, rate: str, workers: str) -> Iterator[Case]:
        for name in self.options.only:
            case = Case(
                task=task,
                rate=rate,
                workers=workers,
                contender=name,
                seed=self.options.seed,
                purpose=ROW,
                epochs=self.setting(task).epochs,
                device=self.options.device,
            )
            yield replace(case, settings=found(self.cache, case))

    def run(self, hosts: Hosts) -> None:
        for task, workers, rate in self.parts():
            hosts.set_rate(rate)
            if self.options.search and workers == EQUAL:
                self.search(hosts, task, rate)
            for case in self.rows(task, rate, workers) if not self.options.search_only else ():
                self.measure(hosts, case, self.limit_s(case))

    def parts(self) -> Iterator[tuple[str, str, str]]:
        """Task, workers and rate, in the order in which they run."""
        return product(self.options.tasks, self.options.workers, self.options.rates)

    def search(self, hosts: Hosts, task: str, rate: str) -> None:
        """Every try of every contender that has several. One that is much later than the best so far is over;
        a little later it may be, and still be the sooner one by other seeds."""
        for row in self.rows(task, rate, EQUAL):
            limit_s = min(SETTINGS[task].search_limit_s, self.limit_s(row))
            for settings in self.tries(row):
                outcome = self.measure(hosts, replace(row, settings=settings, purpose=SEARCH), limit_s)
                limit_s = min(limit_s, MUCH_LATER * seconds(outcome))

    @staticmethod
    def tries(case: Case) -> Sequence[Mapping[str, Any]]:
        """None for a contender that has nothing to choose."""
        tries = CONTENDERS[case.contender].tries_at(SETTINGS[case.task].shorter)
        return tries if len(tries) > 1 else ()

    def measure(self, hosts: Hosts, case: Case, limit_s: float) -> Outcome:
        outcome = self.cache.get(case)
        if outcome is not None and not (outcome.ended == FAILED and self.options.again):
            return outcome
        setting, data = self.setting(case.task), self.load(case.task)
        if not any(f"({case.rate})" in note for note in self.cache.notes):
            self.cache.note(hosts.describe_link())
        began = time.monotonic()
        try:
            outcome = launch.run(hosts, partial(work, case, setting, data, limit_s), limit_s + OVERHEAD_S)
        except launch.CaseFailed as failure:
            outcome = Outcome(case=case, ended=FAILED, failure=str(failure), limit_s=limit_s)
        assert isinstance(outcome, Outcome)
        self.cache.add(outcome)
        took = time.monotonic() - began
        told = cells(Row((outcome,)))
        print(
            f"[{time.monotonic() - self.began:5.0f} s] {case.purpose} {case}: {told[5]} s to target,"
            f" final {told[6]}, {told[9]} ms a step, {told[11]} (took {took:.0f} s)",
            flush=True,
        )
        return outcome

    def load(self, task: str) -> Data:
        if task not in self.data:
            self.data[task] = SETTINGS[task].load(self.options.data)
        return self.data[task]

    def estimate(self) -> str:
        """What is left to do, and how long that may take at the most: many get to the target before."""
        most_s = []
        for task, workers, rate in self.parts():
            for case in self.rows(task, rate, workers):
                if not self.options.search_only and self.cache.get(case) is None:
                    most_s.append(self.limit_s(case))
                if self.options.search and workers == EQUAL:
                    tries = [replace(case, settings=tried, purpose=SEARCH) for tried in self.tries(case)]
                    most_s += [
                        SETTINGS[task].search_limit_s for tried in tries if self.cache.get(tried) is None
                    ]
        minutes = (sum(most_s) + START_S * len(most_s)) / 60
        return f"{len(most_s)} cases to run, {minutes:.0f} minutes at the most"


def several(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("OFFBEAT_DATA"), help="the data sets")
    parser.add_argument("--out", type=Path, required=True, help="folder of the cache, not in the repository")
    parser.add_argument("--tasks", type=several, default=[GOAL_TASK], help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--rates", type=several, default=["1gbit", "200mbit", "50mbit"])
    parser.add_argument("--only", type=several, default=list(CONTENDERS), help="these contenders")
    parser.add_argument("--not", dest="leave", type=several, default=[], help="not these contenders")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--equal", dest="workers", action="store_const", const=[EQUAL], help="no straggler")
    which.add_argument("--straggler", dest="workers", action="store_const", const=[STRAGGLER])
    parser.add_argument("--search", action="store_true", help="look for each contender's best settings first")
    parser.add_argument("--search-only", action="store_true", help="do that, and no more")
    parser.add_argument("--again", action="store_true", help="run again what has failed")
    parser.add_argument("--table", action="store_true", help="only write the tables of what is in the cache")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --table: draw them too, as SVG")
    parser.add_argument("--epochs", type=float, help="instead of the task's")
    parser.add_argument("--limit-s", type=float, help="seconds of training, instead of the task's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", choices=[CPU, CUDA], default=CPU, help="of the models; cuda: all workers share a GPU"
    )
    options = parser.parse_args(arguments)
    options.workers = options.workers or [EQUAL, STRAGGLER]
    options.search = options.search or options.search_only
    try:
        for task in options.tasks:
            pick("task", task, SETTINGS)
        for name in [*options.only, *options.leave]:
            pick("contender", name, CONTENDERS)
    except OffbeatError as error:
        parser.error(str(error))
    if options.data is None and not options.table:
        parser.error("say where the data sets are: --data FOLDER, or OFFBEAT_DATA")
    options.only = [name for name in CONTENDERS if name in options.only and name not in options.leave]
    missing = [name for name in options.only if not installed(name)]
    if missing and not options.table:
        print(f"left out, as their libraries are not installed: {', '.join(missing)}", file=sys.stderr)
        options.only = [name for name in options.only if name not in missing]
    return options


def origin(arguments: Sequence[str]) -> list[str]:
    """What to write above the tables: by which command, with which libraries, where."""
    kept = list(arguments)
    for option in {"--data", "--out"} & set(kept):  # folders of no meaning to others
        kept[kept.index(option) + 1] = "FOLDER"
    libraries = sorted({contender.needs for contender in CONTENDERS.values()})
    versions = [f"{name} {version(name)}" for name in libraries if importlib.util.find_spec(name)]
    run = f"run by `python -m benchmarks.peers {' '.join(kept)}`"
    return [run, f"libraries: {', '.join(versions)}", f"machine: {machine()}"]


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, _interrupt)
    torch.set_num_threads(1)  # a process with threads could not be forked
    torch.optim.SGD([torch.zeros(1)])  # torch imports a lot at the first one: once here, not in every case
    cache = Cache(options.out, options.device)
    comparison = Comparison(options, cache)
    if not options.table:
        print(comparison.estimate(), flush=True)
        for note in origin(sys.argv[1:]):
            if note not in cache.notes:
                cache.note(note)
        try:
            with Hosts(count=HOSTS, rate=options.rates[0]) as hosts:
                comparison.run(hosts)
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {cache.path}, the same command goes on", file=sys.stderr)
            return 130
        for goal in goals(cache):
            print(goal)
        return 0
    for table in tables(cache, __doc__ or ""):
        table.write()
    if options.picture:
        draw(cache, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
