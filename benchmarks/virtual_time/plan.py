"""Does `offbeat plan` choose the fastest strategy?

    python -m benchmarks run plan --data FOLDER
    python -m benchmarks run plan --data FOLDER --part 1/3     # beside 2/3 and 3/3, then --table
    python -m benchmarks run plan --table

Four emulated hosts; three tasks at three rates, with equal workers and with one 4x slower: 18 cases. The
planner was tuned with none of them, nor with this seed; only `digits` was seen before, with another target
and on another cluster. In each case `offbeat plan` probes the hosts and ranks the candidates. Then `offbeat
train` runs the first candidates of different strategies, and BSP, on the same hosts.

A candidate's measured seconds are those of the real run at the step at which, on average over its seeds, it
reached the target in virtual time: so hosts are measured, and not the luck of one seed. Without a server the
real run has the weights of the virtual one to the bit, so its steps are the same. With a server they may
differ; the last column has the seconds at which the real run itself was evaluated at the target.

Goal: the first choice takes at most 1.10x as long as the fastest candidate measured, in every case. Only the
top of the ranking is measured, so a fast candidate ranked far behind goes unnoticed.

A finished case is kept among the raw results, and not run again unless `--again`. A case that failed counts
as a miss, and is tried again by the next command.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.hosts import HostFailed, Hosts
from benchmarks.support.kept import code_print
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.parts import add_part_option, exit_on_signals
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import Table, machine
from offbeat.core.units import parse_rate
from offbeat.experiments.planner.plan_file import Plan, Ranked, load_plan

HOSTS = 4
GOAL = 1.10
PLAN_S, START_S = 60.0, 10.0  # estimates: a plan, and what comes before and after the steps of a real run
RATES = ("1gbit", "200mbit", "50mbit")
STRAGGLERS = {"equal": (), "one 4x slower": ("--slow", "3=4.0")}
COLUMNS = [
    *("case", "rank", "candidate", "steps", "predicted s", "measured s", "measured rank", "/ fastest"),
    "seconds of its own",
]


@dataclass(frozen=True)
class Subject:
    """A task, its model and its bytes, and a target that BSP reaches in some 35 steps."""

    name: str
    target: float
    nbytes: int
    options: tuple[str, ...] = ()


TASKS = (
    Subject("digits", 0.75, 172_200),
    Subject("fashion-mnist", 0.7, 2_678_824),
    Subject("mnist", 0.75, 2_678_824, ("--model", "mlp")),
)


@dataclass(frozen=True)
class Case:
    """A task, the rate of the links, and whether a worker is slow."""

    subject: Subject
    rate: str
    workers: str

    @property
    def name(self) -> str:
        return f"{self.subject.name}, {self.rate}, {self.workers}"

    @property
    def seconds(self) -> float:
        """Estimate the real seconds on a machine with a core for each worker: a plan, and three real runs."""
        exchange_s = 2 * (HOSTS - 1) / HOSTS * self.subject.nbytes * 8 / parse_rate(self.rate)
        return PLAN_S + 3 * (START_S + 48 * (exchange_s + (0.16 if STRAGGLERS[self.workers] else 0.04)))


CASES = tuple(itertools.starmap(Case, itertools.product(TASKS, RATES, STRAGGLERS)))


@dataclass(frozen=True)
class Measured:
    """The real run of a candidate: its seconds at the planned steps, and at its own target."""

    seconds: float
    own_s: float | None


@dataclass(frozen=True)
class Training:
    """Training job on the hosts, which `offbeat plan` and `offbeat train` share."""

    hosts: Hosts
    data: Path
    out: Path
    pace: str
    steps: int
    evaluate_every: int
    strategies: str
    most_seeds: int
    seed: int

    def described(self, most: int) -> dict[str, Any]:
        """Return all options that a result depends on."""
        names = ("pace", "steps", "evaluate_every", "strategies", "most_seeds", "seed")
        return {"most": most, **{name: getattr(self, name) for name in names}}

    def plan(self, case: Case) -> Plan:
        """Run `offbeat plan` on the hosts; return the plan it wrote."""
        file = self.out / "plan.toml"
        tried = ("--strategies", self.strategies, "--most-seeds", self.most_seeds, "--out", file)
        self._offbeat("plan", case, *tried, timeout=600)
        return load_plan(file)

    def measure(self, case: Case, candidate: Ranked) -> Measured:
        """Train with a candidate."""
        settings = [
            part for key, value in candidate.strategy_settings.items() for part in ("--set", f"{key}={value}")
        ]
        folder = self.out / "run"
        self._offbeat(
            "train", case, "--strategy", candidate.strategy, *settings, "--out", folder, timeout=300
        )
        summary = json.loads((folder / "summary.json").read_text())
        steps = candidate.steps_to_target or summary["steps"]
        measured = Measured(seconds_at(steps, summary["history"]), summary["seconds_to_target"])
        print(f"{label(candidate)}: {candidate.seconds_to_target} s predicted, {measured}", flush=True)
        return measured

    def _offbeat(self, command: str, case: Case, *more: object, timeout: float) -> None:
        job = ["--steps", self.steps, "--evaluate-every", self.evaluate_every]
        what = [case.subject.name, *case.subject.options, "--target", case.subject.target, *job]
        emulated = ["--pace", self.pace, "--seed", self.seed, *STRAGGLERS[case.workers]]
        full = [*what, *emulated, "--data", self.data, "--force", "--quiet", *more]
        self.hosts.run(
            [sys.executable, "-m", "offbeat", command, *map(str, full)], timeout=timeout, echo=False
        )


def seconds_at(step: float, history: list[dict[str, Any]]) -> float:
    """Return the seconds of a run at a step, on a line between evaluations; after the last, at its rate."""
    points = [(0.0, 0.0), *((point["step"], point["seconds"]) for point in history)]
    for (before, began), (after, ended) in itertools.pairwise(points):
        if step <= after:
            return float(began + (ended - began) * (step - before) / (after - before))
    return float(points[-1][1] * step / points[-1][0])


def label(candidate: Ranked) -> str:
    return " ".join(
        [candidate.strategy, *(f"{key}={value}" for key, value in candidate.strategy_settings.items())]
    )


def select(ranking: tuple[Ranked, ...], most: int) -> list[tuple[int, Ranked]]:
    """Select the first candidates of `most` strategies that reach the target, and BSP, with their ranks."""
    places = list(enumerate(ranking, 1))
    first: dict[str, tuple[int, Ranked]] = {}
    for place in places:
        if place[1].seconds_to_target is not None and len(first) < most:
            first.setdefault(place[1].strategy, place)
    bsp = [place for place in places if place[1].strategy == "bsp" and not place[1].strategy_settings]
    return [*first.values(), *(place for place in bsp if place not in first.values())]


def run_case(training: Training, case: Case, most: int) -> dict[str, Any]:
    """Plan one case and measure its first candidates; return what is kept, or the error."""
    training.hosts.set_rate(case.rate)
    now = {"code": code_print(), "machine": machine(), "run": training.described(most)}
    try:
        places = select(training.plan(case).ranking, most)
        measured = [training.measure(case, candidate) for _, candidate in places]
    except HostFailed as error:
        return {**now, "error": str(error)}
    candidates = [
        {
            "rank": rank,
            "candidate": label(candidate),
            "steps": candidate.steps_to_target,
            "predicted_s": candidate.seconds_to_target,
            "fate": candidate.fate,
            "measured_s": each.seconds,
            "own_s": each.own_s,
        }
        for (rank, candidate), each in zip(places, measured, strict=True)
    ]
    return {**now, "link": training.hosts.describe_link(), "candidates": candidates}


def is_kept(found: dict[str, Any] | None, run: dict[str, Any]) -> bool:
    """Return whether a case is finished, by this code on this machine, with these options."""
    now = {"code": code_print(), "machine": machine(), "run": run}
    return found is not None and "error" not in found and all(found[key] == now[key] for key in now)


def add_rows(table: Table, case: Case, found: dict[str, Any]) -> float:
    """Add a case to the table; return the seconds of the first choice divided by those of the fastest."""
    if "error" in found:
        table.note(f"{case.name} failed: {' '.join(found['error'].split())[-300:]}")
        return float("inf")
    rows = found["candidates"]
    seconds = [row["measured_s"] if row["steps"] else float("inf") for row in rows]
    best = min(seconds)
    for row, took in zip(rows, seconds, strict=True):
        reached = row["steps"] is not None
        table.row(
            case.name,
            str(row["rank"]),
            row["candidate"],
            f"{row['steps']:.0f}" if reached else "–",
            row["fate"] if row["predicted_s"] is None else f"{row['predicted_s']:.2f}",
            f"{took:.2f}" if reached else "–",
            str(sorted(seconds).index(took) + 1),
            f"{took / best:.2f}" if reached else "–",
            "never" if row["own_s"] is None else f"{row['own_s']:.2f}",
        )
    table.note(
        f"{case.name}: the first choice takes {seconds[0] / best:.3f}x as long as the fastest one; "
        + found["link"]
    )
    return seconds[0] / best


def verdict(ratios: Sequence[float], declared: int) -> str:
    """Say in how many cases the first choice is near the fastest; infinity is a case that failed."""
    near = sum(ratio <= GOAL for ratio in ratios)
    words = f"within 10% of the fastest measured: {near} of {len(ratios)} cases"
    if len(ratios) < declared:
        words += f"; not in this table: {declared - len(ratios)} of {declared}"
    met = "missed" if near < len(ratios) else "met" if len(ratios) == declared else "met so far"
    return f"{words}. The goal (all) is {met}."


def write_table(cases: Sequence[Case], raw: RawResults) -> None:
    """Write the table of all kept cases, if there are some."""
    table = Table("plan", __doc__ or "", COLUMNS)
    kept = {case: found for case in cases if (found := raw.get(case.name)) is not None}
    if not kept:
        print("no case is kept: nothing to write")
        return
    table.verdict = verdict([add_rows(table, case, found) for case, found in kept.items()], len(CASES))
    table.machine = "; ".join(dict.fromkeys(found["machine"] for found in kept.values()))
    if len({found["code"] for found in kept.values()}) > 1:
        table.note("the cases were run by several states of the code")
    print(table.verdict)
    table.write()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("plan", __doc__)
    add_data_option(parser)
    every = ",".join(str(number) for number in range(len(CASES)))
    parser.add_argument("--cases", default=every, help="numbers of the cases to run, from 0")
    parser.add_argument("--most", type=int, default=2, help="strategies to measure per case, besides BSP")
    parser.add_argument("--strategies", default="local_sgd,osp,diloco,ssp", help="to plan with, and bsp")
    parser.add_argument("--most-seeds", type=int, default=2, help="seeds for candidates that are close")
    parser.add_argument("--pace", default="40ms", help="computation time per step")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--evaluate-every", type=int, default=4)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--again", action="store_true", help="run kept cases again")
    parser.add_argument("--table", action="store_true", help="write the table of what is kept; run nothing")
    add_part_option(parser, "cases")
    options = parser.parse_args(arguments)
    chosen = [CASES[number] for number in map(int, options.cases.split(","))]
    raw = RawResults("plan")
    if not options.table:
        data = require_data(parser, options).absolute()
        exit_on_signals()
        with tempfile.TemporaryDirectory() as scratch, Hosts(count=HOSTS, rate=RATES[0]) as hosts:
            training = Training(
                hosts,
                data,
                Path(scratch),
                options.pace,
                options.steps,
                options.evaluate_every,
                options.strategies,
                options.most_seeds,
                options.seed,
            )
            for case in options.part.of(chosen, lambda case: case.seconds):
                if options.again or not is_kept(raw.get(case.name), training.described(options.most)):
                    raw.keep(case.name, run_case(training, case, options.most))
    if options.table or options.part.count == 1:
        write_table(chosen, raw)
