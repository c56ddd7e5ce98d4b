"""Does `offbeat plan` choose the fastest strategy?

    python -m benchmarks run plan --data FOLDER
    python -m benchmarks run plan --data FOLDER --until calibrated     # then rank, then measure: each is kept
    python -m benchmarks run plan --data FOLDER --tasks digits --rates 50mbit
    python -m benchmarks run plan --list
    python -m benchmarks run plan --table

Four emulated hosts; three tasks at three rates, with equal workers and with one 4x slower
(plan_cases.py). The hosts are calibrated, once for each model, rate and kind of workers. In each case
`offbeat plan` ranks all its candidates for the calibrated cluster; this needs no hosts. Then `offbeat train`
runs the first candidates of different strategies, and BSP, on the hosts.

A candidate's measured seconds are those of the real run at the step at which it reached the target in
virtual time; where work is shared, when the workers had done so many batches each, on average. What the first
steps took longer than later ones is left out, as in the benchmark `prediction`: it is some 0.1 s, whatever is
trained. Runs of earlier code do not say how much it was, so their seconds include it.
Both have the same seed, and one seed is enough: hosts are measured, and not the luck of a seed.
Without a server the real run has the weights of the virtual one to the bit, so its steps are the same. With
a server they may differ; the last column has the real run's value at its end, a few steps later. It is not
evaluated before: where a server holds the model, the others train on while rank 0 evaluates.

A run has reached the target if its value at its end meets it. One that ends below has "missed" it, whatever
its seconds, and is compared with nobody: this holds for the first choice and for all others, also for a run
that met the target on the way and slipped back, for most runs cannot be asked on the way. A case whose first
choice missed the target is not a hit. If others reached it, the first choice "missed the target"; if none of
those measured did, the "target was not reached by any".

Goal: the first choice reaches the target and takes at most 1.10x as long as the fastest candidate measured
that reaches it, in every case. Only the top of the ranking is measured, so a fast candidate ranked far behind
goes unnoticed. The verdict also counts how many predicted seconds are off by more than 7% and 15%.

A finished calibration, ranking or case is kept among the raw results, and not run again unless `--again`. A
case that failed counts as a miss, and is tried again by the next command. Rankings are computed at idle
priority, one on each core, before the real runs; with `--beside`, also beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.bytecode import cached_bytecode
from benchmarks.support.hosts import HostFailed, Hosts
from benchmarks.support.kept import code_print
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.parts import add_part_option, exit_on_signals
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import machine
from benchmarks.virtual_time.plan_cases import (
    HOSTS,
    MOST_SEEDS,
    PACE_S,
    RATES,
    STEPS,
    STRAGGLERS,
    TASKS,
    Case,
    describe,
    select,
)
from benchmarks.virtual_time.plan_seconds import progress, seconds_at, start_seconds
from benchmarks.virtual_time.plan_table import write_table
from offbeat.experiments.planner.candidates import candidates, codecs_of
from offbeat.experiments.planner.plan_file import Ranked, load_plan

Found = dict[str, Any]  # what is kept of a part; with "error", if it failed
STAGES = ("calibrated", "ranked", "measured")
TIMEOUT_S = 300.0


class RankingFailed(Exception):
    """`offbeat plan` failed."""


@dataclass(frozen=True)
class Measured:
    """The real run of a candidate: its seconds at the planned steps, and its value at the end.

    start_s   how much longer the first steps took than as many later ones; `seconds` include it
    """

    seconds: float
    value: float
    start_s: float


@dataclass
class Bench:
    """What all cases have in common: the hosts, folders, options, and the results that are kept."""

    hosts: Hosts | None  # None: nothing is measured
    data: Path
    scratch: Path
    raw: RawResults
    steps: int
    evaluate_every: int
    strategies: str | None
    seed: int
    most: int
    again: bool = False
    any_code: bool = False  # calibrations and rankings are used, whatever code made them
    _links: dict[str, str] = field(default_factory=dict)  # by rate
    _rankings: list[subprocess.Popen[str]] = field(default_factory=list)  # ended ones, too

    def kept(self, part: str, depends: Sequence[str], make: Callable[[], Found]) -> Found:
        """Return what is kept of a part; make it, if that failed or is of other code or options."""
        run = {"pace_s": PACE_S, **{name: getattr(self, name) for name in depends}}
        now = {"code": code_print(), "machine": machine(), "run": run}
        found: Found | None = self.raw.get(part)
        before = found is not None and self.any_code and "most" not in depends  # a calibration or a ranking
        if (
            found is None
            or self.again
            or not is_kept(found, now | {"code": found["code"]} if before else now)
        ):
            try:
                found = {**now, **make()}
            except (HostFailed, RankingFailed) as error:
                found = {**now, "error": str(error)}
                print(f"failed: {part}: {error}", flush=True)
            self.raw.keep(part, found)
        return found

    def stop(self) -> None:
        """Kill the rankings that still run."""
        for process in self._rankings:
            process.kill()

    # --- the stages

    def calibrate(self, case: Case) -> Found:
        """Return the calibrated hosts of a case, as a cluster file and in words."""
        return self.kept(f"calibration {case.hosts}", ("strategies",), partial(self._calibrate, case))

    def rank(self, case: Case, calibration: Found) -> Found:
        """Return the plan of a case, as the text of its file."""
        if "error" in calibration:
            return calibration
        depends = ("strategies", "steps", "evaluate_every", "seed")
        return self.kept(f"ranking {case.name}", depends, partial(self._rank, case, calibration["cluster"]))

    def measure(self, case: Case, calibration: Found, ranking: Found) -> Found:
        """Return the real runs of a case's first candidates, or the error."""
        depends = ("strategies", "steps", "evaluate_every", "seed", "most")
        return self.kept(case.name, depends, partial(self._measure, case, calibration, ranking))

    def _calibrate(self, case: Case) -> Found:
        hosts = self._hosts_of(case)
        if case.rate not in self._links:
            self._links[case.rate] = hosts.describe_link()
        file = self.scratch / "cluster.toml"
        codecs = codecs_of(candidates(self._names()))
        timed = [part for codec in codecs for part in ("--codec", str(codec))]
        self._on_hosts("calibrate", case, *timed, "--out", file)
        print(f"calibrated: {case.hosts}", flush=True)
        return {"link": self._links[case.rate], "cluster": file.read_text()}

    def _rank(self, case: Case, cluster: str) -> Found:
        file = self.scratch / f"{case.name}.toml"
        on = file.with_suffix(".cluster.toml")
        on.write_text(cluster)
        chosen = ["--strategies", self.strategies] if self.strategies else []
        job = [
            *self._job(self.steps, self.evaluate_every),
            "--most-seeds",
            MOST_SEEDS,
            "--target",
            case.subject.target,
        ]
        command = offbeat("plan", *self._task(case), *job, *chosen, "--cluster", on, "--out", file)
        began = time.monotonic()
        self._run_idle(command)
        first = label(load_plan(file).ranking[0])
        print(f"ranked in {time.monotonic() - began:.0f} s: {case.name}: {first} is first", flush=True)
        return {"plan": file.read_text()}

    def _measure(self, case: Case, calibration: Found, ranking: Found) -> Found:
        if "error" in ranking:
            return {"error": ranking["error"]}
        file = self.scratch / "plan.toml"
        file.write_text(ranking["plan"])
        places = first_of_each(load_plan(file).ranking, self.most)
        measured = [self._train(case, candidate) for _, candidate in places]
        rows = [
            {
                "rank": rank,
                "candidate": label(candidate),
                "steps": candidate.steps_to_target,
                "predicted_s": candidate.seconds_to_target,
                "fate": candidate.fate,
                "measured_s": each.seconds,
                "start_s": each.start_s,
                "value": each.value,
                "target": case.subject.target,
            }
            for (rank, candidate), each in zip(places, measured, strict=True)
        ]
        return {"link": calibration["link"], "candidates": rows}

    def _train(self, case: Case, candidate: Ranked) -> Measured:
        """Train with a candidate on the hosts, a little longer than to its planned steps."""
        settings = [
            part for key, value in candidate.strategy_settings.items() for part in ("--set", f"{key}={value}")
        ]
        folder = self.scratch / "run"
        planned = candidate.steps_to_target or self.steps
        log = folder.with_suffix(".jsonl")
        steps = math.ceil(planned) + self.evaluate_every
        job = [*self._job(steps, steps), "--target", case.subject.target, "--log", log]
        self._on_hosts("train", case, "--strategy", candidate.strategy, *settings, *job, "--out", folder)
        summary = json.loads((folder / "summary.json").read_text())
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        seconds = [row["seconds"] for row in rows if row["event"] == "step"]
        batches = [worker["steps"] for worker in summary["per_worker"]]
        took_s = seconds_at(planned, progress(seconds, batches))
        measured = Measured(took_s, summary["history"][-1]["value"], start_seconds(seconds))
        predicted = candidate.seconds_to_target
        print(f"{case.name}: {label(candidate)}: {predicted} s predicted, {measured}", flush=True)
        return measured

    # --- commands

    def _names(self) -> list[str] | None:
        return self.strategies.split(",") if self.strategies else None

    def _hosts_of(self, case: Case) -> Hosts:
        """Return the hosts, with links of the case's rate."""
        if self.hosts is None:
            raise SystemExit(f"{case.hosts}: not calibrated by this code: first run with --until calibrated")
        if self.hosts.rate != case.rate:
            self.hosts.set_rate(case.rate)
        return self.hosts

    def _task(self, case: Case) -> list[object]:
        return [case.subject.name, "--model", case.subject.model, "--data", self.data, "--force", "--quiet"]

    def _job(self, steps: int, every: int) -> list[object]:
        return ["--steps", steps, "--evaluate-every", every, "--seed", self.seed]

    def _on_hosts(self, command: str, case: Case, *more: object) -> None:
        paced = ["--pace", f"{PACE_S}s", *STRAGGLERS[case.workers]]
        full = offbeat(command, *self._task(case), *paced, *more)
        self._hosts_of(case).run(full, timeout=TIMEOUT_S, echo=False)

    def _run_idle(self, command: Sequence[str]) -> None:
        """Run a command that gets only the time that no other process needs."""
        env = {**os.environ, **cached_bytecode(), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
            self._rankings.append(process)
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            _, errors = process.communicate()
        if process.returncode:
            raise RankingFailed(errors.strip()[-500:])


def offbeat(*arguments: object) -> list[str]:
    """Return the command `offbeat` with these arguments."""
    return [sys.executable, "-m", "offbeat", *map(str, arguments)]


def label(candidate: Ranked) -> str:
    return " ".join(
        [candidate.strategy, *(f"{key}={value}" for key, value in candidate.strategy_settings.items())]
    )


def first_of_each(ranking: Sequence[Ranked], most: int) -> list[tuple[int, Ranked]]:
    """Select the first candidates of `most` strategies that reach the target, and BSP, with their ranks."""
    places = list(enumerate(ranking, 1))
    first: dict[str, tuple[int, Ranked]] = {}
    for place in places:
        if place[1].seconds_to_target is not None and len(first) < most:
            first.setdefault(place[1].strategy, place)
    bsp = [place for place in places if place[1].strategy == "bsp" and not place[1].strategy_settings]
    return [*first.values(), *(place for place in bsp if place not in first.values())]


def is_kept(found: Found, now: Found) -> bool:
    """Return whether a part is finished, by this code on this machine, with these options."""
    return "error" not in found and all(found.get(key) == now[key] for key in now)


def run_cases(bench: Bench, cases: Sequence[Case], until: str, beside: bool) -> None:
    """Calibrate the hosts of all cases, rank, and measure, as far as is asked for."""
    calibrations = [bench.calibrate(case) for case in cases]
    if until == "calibrated":
        return
    with ThreadPoolExecutor(1 if beside else os.cpu_count()) as pool:
        try:
            rankings = [pool.submit(bench.rank, *pair) for pair in zip(cases, calibrations, strict=True)]
            if not beside:
                wait(rankings)
            for case, calibration, ranking in zip(cases, calibrations, rankings, strict=True):
                if until == "measured":
                    bench.measure(case, calibration, ranking.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            bench.stop()
            raise


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of the command."""
    add_data_option(parser)
    every = {"--tasks": [subject.name for subject in TASKS], "--rates": RATES, "--workers": STRAGGLERS}
    for option, choices in every.items():
        parser.add_argument(
            option, nargs="+", choices=list(choices), default=list(choices), help="default: all"
        )
    parser.add_argument("--until", choices=STAGES, default="measured", help="end after this stage")
    parser.add_argument("--beside", action="store_true", help="compute rankings beside the real runs")
    parser.add_argument("--most", type=int, default=3, help="strategies to measure per case, besides BSP")
    parser.add_argument("--strategies", metavar="NAME,…", help="to plan with, and bsp; default: all")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--evaluate-every", type=int, default=6)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--again", action="store_true", help="run what is kept again")
    parser.add_argument(
        "--ranked-before", action="store_true", help="use kept calibrations and rankings of other code"
    )
    parser.add_argument("--list", action="store_true", help="show the cases and their minutes; run nothing")
    parser.add_argument("--table", action="store_true", help="write the table of what is kept; run nothing")
    add_part_option(parser, "cases")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("plan", __doc__)
    options = options_of(parser, arguments)
    chosen = select(options.tasks, options.rates, options.workers)
    cases = options.part.of(chosen, lambda case: case.ranking_s + case.measuring_s(options.most))
    raw = RawResults("plan")
    if options.list:
        print("\n".join(describe(cases, options.most, os.cpu_count() or 1)))
        return
    if not options.table:
        data = require_data(parser, options).absolute()
        exit_on_signals()
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # Rankings of what is calibrated need no hosts, and so no root.
            hosts = None if options.until == "ranked" else stack.enter_context(Hosts(HOSTS, RATES[0]))
            bench = Bench(
                hosts,
                data,
                scratch,
                raw,
                options.steps,
                options.evaluate_every,
                options.strategies,
                options.seed,
                options.most,
                options.again,
                options.ranked_before,
            )
            run_cases(bench, cases, options.until, options.beside)
    if options.until == "measured" and (options.table or options.part.count == 1):
        kept = {case: raw.get(case.name) for case in chosen}
        write_table(__doc__ or "", {case: found for case, found in kept.items() if found is not None})
