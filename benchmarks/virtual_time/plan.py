"""Does `offbeat plan` choose the fastest strategy?

    python -m benchmarks run plan

Four emulated hosts at three rates, and at one of them with a straggler; `digits`, paced. In each case
`offbeat plan` probes the hosts and ranks the candidates. Then `offbeat train` runs the candidates ranked
first, and BSP, on the same hosts with the same seed and evaluations. The table shows the predicted and the
measured seconds to the target. Goal: the first choice takes at most 1.15x as long as the fastest candidate
measured. Only the top of the ranking is measured, so a fast candidate ranked far behind goes unnoticed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.hosts import Hosts
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from offbeat.experiments.planner.plan_file import Plan, Ranked, load_plan

HOSTS = 4
GOAL = 1.15
STRAGGLER = ("--slow", "3=4.0")
COLUMNS = ["case", "predicted rank", "candidate", "predicted s", "measured s", "measured rank", "/ fastest"]


@dataclass(frozen=True)
class Case:
    """Rate of the links, and options that slow some workers down."""

    name: str
    rate: str
    emulated: tuple[str, ...] = ()


CASES = (
    Case("1gbit", "1gbit"),
    Case("200mbit", "200mbit"),
    Case("50mbit", "50mbit"),
    Case("200mbit, one worker 4x slower", "200mbit", STRAGGLER),
)


@dataclass(frozen=True)
class Training:
    """Training job on the hosts, which `offbeat plan` and `offbeat train` share."""

    hosts: Hosts
    out: Path
    pace: str
    steps: int
    evaluate_every: int
    target: float
    seed: int

    def plan(self, case: Case) -> Plan:
        """Run `offbeat plan` on the hosts; return the plan it wrote."""
        file = self.out / "plan.toml"
        self._offbeat("plan", case, "--out", file, timeout=400)
        return load_plan(file)

    def measure(self, case: Case, candidate: Ranked) -> float | None:
        """Train with a candidate; return the seconds to the target, or None if it was not reached."""
        settings = [
            part for key, value in candidate.strategy_settings.items() for part in ("--set", f"{key}={value}")
        ]
        folder = self.out / "run"
        self._offbeat(
            "train", case, "--strategy", candidate.strategy, *settings, "--out", folder, timeout=200
        )
        seconds: float | None = json.loads((folder / "summary.json").read_text())["seconds_to_target"]
        print(
            f"{label(candidate)}: {candidate.seconds_to_target} s predicted, {seconds} measured", flush=True
        )
        return seconds

    def _offbeat(self, command: str, case: Case, *more: object, timeout: float) -> None:
        job = ["--steps", self.steps, "--evaluate-every", self.evaluate_every, "--target", self.target]
        what = ["digits", "--pace", self.pace, "--seed", self.seed, *job, *case.emulated, "--force", *more]
        full = [sys.executable, "-m", "offbeat", command, *map(str, what)]
        self.hosts.run(full, timeout=timeout, echo=False)


def label(candidate: Ranked) -> str:
    return " ".join(
        [candidate.strategy, *(f"{key}={value}" for key, value in candidate.strategy_settings.items())]
    )


def select(ranking: tuple[Ranked, ...], most: int) -> list[tuple[int, Ranked]]:
    """Select the first candidates predicted to reach the target, and BSP, with their ranks."""
    places = list(enumerate(ranking, 1))
    first = [place for place in places if place[1].seconds_to_target is not None][:most]
    bsp = [place for place in places if place[1].strategy == "bsp" and not place[1].strategy_settings]
    return first + [place for place in bsp if place not in first]


def compare(table: Table, training: Training, case: Case, most: int, rounds: int) -> float:
    """Measure one case; return the seconds of the first choice divided by those of the fastest."""
    plan = training.plan(case)
    places = select(plan.ranking, most)
    times: list[list[float | None]] = [[] for _ in places]
    for _ in range(rounds):
        for took, (_, candidate) in zip(times, places, strict=True):
            took.append(training.measure(case, candidate))
    known = [[t for t in took if t is not None] for took in times]
    seconds = [statistics.median(t) if len(t) == rounds else float("inf") for t in known]
    best = min(seconds)
    for (rank, candidate), took in zip(places, seconds, strict=True):
        predicted = candidate.seconds_to_target
        table.row(
            case.name,
            str(rank),
            label(candidate),
            candidate.fate if predicted is None else f"{predicted:.2f}",
            "never" if took == float("inf") else f"{took:.2f}",
            str(sorted(seconds).index(took) + 1),
            f"{took / best:.2f}",
        )
    table.note(f"{case.name}: the first choice takes {seconds[0] / best:.3f}x as long as the fastest one")
    return seconds[0] / best


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("plan", __doc__)
    parser.add_argument("--cases", default="0,1,2,3", help="numbers of the cases to run")
    parser.add_argument("--most", type=int, default=6, help="candidates to measure per case, besides BSP")
    parser.add_argument("--rounds", type=int, default=1, help="measurements per candidate; the median counts")
    parser.add_argument("--pace", default="30ms", help="computation time per step")
    parser.add_argument("--steps", type=int, default=132)
    parser.add_argument("--evaluate-every", type=int, default=6)
    parser.add_argument("--target", type=float, default=0.93)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    table = Table("plan", __doc__ or "", COLUMNS)
    ratios = []
    with tempfile.TemporaryDirectory() as scratch, Hosts(count=HOSTS, rate=CASES[0].rate) as hosts:
        training = Training(
            hosts,
            Path(scratch),
            options.pace,
            options.steps,
            options.evaluate_every,
            options.target,
            options.seed,
        )
        for number in map(int, options.cases.split(",")):
            hosts.set_rate(CASES[number].rate)
            table.note(hosts.describe_link())
            ratios.append(compare(table, training, CASES[number], options.most, options.rounds))
    table.note(f"within {GOAL}: {sum(ratio <= GOAL for ratio in ratios)} of {len(ratios)} cases")
    table.write()
