"""What do public traces of spot machines do to a training of hours, and to its plan?

    python -m benchmarks run spot --traces FOLDER

FOLDER is a clone of the repository skypilot-org/spot-traces on GitHub. `TRACES` were chosen before any was
run. `offbeat plan --trace FILE` does the same for one of them, but drops a strategy after its first failure.

Machines live for hours there, so a step takes two minutes here: several preemptions fall into a training.
Eight workers train the digits' MLP, which stands for a large network: links are so slow that an all-reduce of
its gradients takes as long. A server has a machine of its own with eight times the link, which is paid.
It is never preempted; under a strategy with a server worker 0, which evaluates, is not either. Each seed
begins elsewhere in the trace. A machine costs 1 an hour, and nothing while it is away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from benchmarks.virtual_time.spot_facts import FACTS, HOUR_S, describe
from offbeat import BSP, SSDSGD, SSP, DiLoCo, LocalSGD, Oscars
from offbeat.experiments.job import Job
from offbeat.experiments.planner.ranking import Outcome, ranked
from offbeat.experiments.planner.trials import attempt
from offbeat.experiments.tasks import task
from offbeat.worlds.virtual.cluster import Cluster, ServerMachines, Workers
from offbeat.worlds.virtual.outages import ElasticTimes
from offbeat.worlds.virtual.spot_trace import SpotTrace, load_spot_trace

NAME = "spot"
SOURCE = "clone the repository skypilot-org/spot-traces from GitHub, and give its folder as --traces"
TRACES = (
    "preemption/1-node/aws-04-22-2023/us-west-2b_v100_1.json",
    "preemption/1-node/aws-04-22-2023/us-east-1c_v100_1.json",
    "preemption/1-node/gcp-04-30-2023/us-central1-a_c3-88.json",
    "preemption/4-node/aws-08-03-2023/us-east-2a_v100_1.json",
    "preemption/4-node/aws-08-03-2023/us-west-2c_v100_1.json",
    "availability/16-node/aws-08-27-2023/us-west-2a_v100_1.json",
)
STRATEGIES = (BSP(), LocalSGD(period=8), DiLoCo(period=16), SSDSGD(delay=5, warmup=20), SSP(), Oscars())
WORKERS, STEPS, TARGET, SEEDS = 8, 600, 0.95, tuple(range(8))
STEP_S, GRADIENT_BITS = 120.0, 32 * 2_410
RATE = GRADIENT_BITS * 2 * (WORKERS - 1) / WORKERS / STEP_S  # an all-reduce takes as long as a step
TIMEOUT_S = 7200.0  # longer than a round of 16 steps, or who comes back gives up before it is admitted
PLANNED = (
    "trace",
    "place",
    "strategy",
    "seeds at the target",
    "hours to the target",
    "samples/s that count",
    "money to the target",
    "preemptions until then, or until the last evaluation",
    "failure",
)


def plan(trace: SpotTrace | None) -> list[Outcome]:
    """Rank the strategies as `offbeat plan` does, but try each with all seeds."""
    fast = ServerMachines(up_bits_per_s=WORKERS * RATE, down_bits_per_s=WORKERS * RATE)
    workers = Workers(step_s=STEP_S, count=WORKERS, up_bits_per_s=RATE, down_bits_per_s=RATE)
    cluster = Cluster(workers=(workers,), server=fast, elastic=ElasticTimes(timeout_s=TIMEOUT_S))
    data = (digits := task("digits", model="mlp")).load(None)
    job = Job(task=digits, strategy=BSP(), workers=WORKERS, steps=STEPS, evaluate_every=4, target=TARGET)
    jobs = [[replace(job, strategy=strategy, seed=seed) for seed in SEEDS] for strategy in STRATEGIES]
    trials = [tuple(attempt(each, cluster, data, failures=trace) for each in own) for own in jobs]
    return ranked([Outcome(own[0].job.strategy, own) for own in trials])


def cells(place: int, outcome: Outcome) -> list[str]:
    """Write a strategy's place in a plan."""
    ends = [(trial, trial.reached.seconds if trial.reached else trial.seconds) for trial in outcome.trials]
    lost = fmean(sum(away.from_s < end for away in trial.unpaid) for trial, end in ends)
    return [
        str(place),
        outcome.label,
        f"{len(outcome.crossings)} of {len(outcome.trials)}",
        "–" if (seconds := outcome.seconds.mean) is None else f"{seconds / HOUR_S:.2f}",
        "–" if (rate := outcome.goodput.mean) is None else f"{rate:.3f}",
        "–" if not outcome.succeeds else f"{(outcome.machine_seconds.mean or 0) / HOUR_S:.1f}",
        f"{lost:.1f}",
        next((trial.problem for trial in outcome.trials if trial.problem), outcome.failure),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("spot", __doc__)
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="a clone of skypilot-org/spot-traces")
    folder = parser.parse_args(arguments).traces
    if folder is None:
        parser.error(f"the traces are needed: {SOURCE}")
    for name in TRACES:
        if not (folder / name).is_file():
            parser.error(f"{folder} has no {name}, so it does not hold the traces: {SOURCE}")
    traces = {name: load_spot_trace(folder / name) for name in TRACES}
    read = Table(NAME, "What do the traces say, as Offbeat reads them?", FACTS, variant="traces")
    for name, trace in traces.items():
        read.row(name, *describe(trace))
    read.write()
    table = Table(NAME, __doc__ or "", PLANNED)
    first, cheapest = Counter[str](), Counter[str]()
    for name in ("none", *TRACES):
        outcomes = plan(traces.get(name))
        for place, outcome in enumerate(outcomes, 1):
            table.row(name, *cells(place, outcome))
        good = [each for each in outcomes if each.succeeds]
        if name in traces:
            first[good[0].label if good else "none"] += 1
            cheapest[
                min(good, key=lambda each: each.machine_seconds.mean or 0.0).label if good else "none"
            ] += 1
    places = [", ".join(f"{label} {count}" for label, count in c.most_common()) for c in (first, cheapest)]
    table.verdict = f"of {len(traces)} traces, first: {places[0]}; cheapest: {places[1]}"
    table.write()
