"""Does virtual time predict real step times?

    python -m benchmarks run prediction --data FOLDER
    python -m benchmarks run prediction --data FOLDER --part 1/3     # beside 2/3 and 3/3, then --table
    python -m benchmarks run prediction --data FOLDER --predict-again
    python -m benchmarks run prediction --table

On four emulated hosts, for each model, rate and kind of workers: `offbeat calibrate` on the hosts, `offbeat
train` there under each strategy, and `offbeat simulate` on the calibrated cluster. The table compares
predicted with measured seconds per step. Goal: within 7% in nine of ten cases, and beyond 15% in none.
Computation is paced, so that a few cores can stand for four machines. A calibration measures the model, not
the strategy or its settings. The first two steps are not counted in either world: a process is slower at
its first. Where work is shared, a step is the time in which the workers did one batch each, on average.
"Cores idle" is what the real run left of the machine's processors: a case that left next to nothing says more
of the machine than of the prediction.

The cases are declared in `prediction_cases.py`; `--list` shows them. A finished case is kept among the raw
results, and not run again unless `--again`, which runs those that are chosen and keeps the others. A case
that failed counts as a miss, and is tried again by the next command. With 8 cores or more, predictions are
computed beside the real runs. `--predict-again`, on the same machine, keeps the real runs, and calibrates and
predicts anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.support.hosts import HostFailed, Hosts
from benchmarks.support.idle import IdleCores
from benchmarks.support.kept import code_print
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.parts import add_part_option, exit_on_signals
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import machine
from benchmarks.virtual_time.prediction_cases import (
    HOSTS,
    METHODS,
    MODELS,
    RATES,
    STRAGGLERS,
    Group,
    Method,
    select,
)
from benchmarks.virtual_time.prediction_table import write_table
from offbeat.worlds.processes.server.shard_count import PIECES
from offbeat.worlds.virtual.cluster import dump, load_cluster

BENCHMARK = "prediction"
CALIBRATION_LIMIT_S, RUN_LIMIT_S = 300.0, 300.0
TRIALS = Path("runs/prediction-trials")  # cases with other numbers of steps are not among the results
WARM_UP = 2  # steps: the first one imports parts of torch, and takes a quarter of a second longer
ENDING_S, IDLE_PART = 1.5, 0.8  # idle cores: over this part of the steps, before the seconds of the end
BESIDE_CORES = 8  # from so many on, a prediction does not disturb the real run beside it


def offbeat(*arguments: object) -> list[str]:
    """Return the command `offbeat` with these arguments."""
    return [sys.executable, "-m", "offbeat", *map(str, arguments)]


def seconds_per_step(folder: Path) -> float:
    """Return the seconds per step after the warm-up, from a run's summary and from the log of rank 0.

    A step is a batch of each worker, on average. Of the warm-up, all workers are taken to have done theirs.
    """
    summary = json.loads((folder / "summary.json").read_text())
    batches = sum(worker["steps"] for worker in summary["per_worker"])
    rows = map(json.loads, log_of(folder).read_text().splitlines())
    # Where work is shared, the number in a row is that of the common progress, so rows are counted.
    warm_s = [row["seconds"] for row in rows if row["event"] == "step"][WARM_UP - 1]
    workers = summary["workers"]
    return float((summary["seconds"] - warm_s) * workers / (batches - WARM_UP * workers))


def log_of(folder: Path) -> Path:
    """Return the file beside a run's folder to which rank 0 logs its steps."""
    return folder.with_suffix(".jsonl")


@dataclass(frozen=True)
class Measurement:
    """How cases are measured: on these hosts, with this data, into this folder."""

    hosts: Hosts
    data: Path
    out: Path
    steps: int | None  # None: the group's
    repeats: int
    pieces: str | None  # OFFBEAT_PIECES of the real runs; None: as by default

    def steps_of(self, group: Group) -> int:
        """Return the number of steps of each worker."""
        return self.steps or group.steps

    def is_kept(self, group: Group, found: Mapping[str, Any] | None) -> bool:
        """Return whether a kept case is finished, and has the steps and repeats that are asked for."""
        return (
            found is not None
            and "error" not in found
            and found["steps"] == self.steps_of(group)
            and len(found["measured_s"]) >= self.repeats
        )

    def calibrate(self, group: Group) -> dict[str, Any]:
        """Calibrate on the hosts; return what is kept of it."""
        codecs = [part for codec in group.codecs for part in ("--codec", codec)]
        command = offbeat("calibrate", *self._paced(group), *codecs, "--out", self._cluster)
        self.hosts.run(command, timeout=CALIBRATION_LIMIT_S, echo=False)
        cluster = load_cluster(self._cluster)
        if self.pieces is not None:
            pieces = 0 if self.pieces == "auto" else int(self.pieces)
            cluster = replace(cluster, shards=replace(cluster.shards, pieces=pieces))
        return {"link": self.hosts.describe_link(), "cluster": dump(cluster)}

    def run(self, group: Group, method: Method, cluster: str) -> dict[str, Any]:
        """Predict a case and measure it; return both, or the error."""
        steps = self.steps_of(group)
        virtual = self.out / "virtual"
        prediction = self._prediction(group, method, cluster, virtual)
        beside = (os.cpu_count() or 1) >= BESIDE_CORES
        try:
            if beside:
                prediction.start()
            trained = [self._train(group, self._job(group, method)) for _ in range(self.repeats)]
            prediction.finish()
        except (HostFailed, PredictionFailed) as error:
            return {"steps": steps, "error": str(error)}
        finally:
            prediction.stop()
        measured, idle = zip(*trained, strict=True)
        predicted_s = seconds_per_step(virtual)
        return {"steps": steps, "measured_s": measured, "predicted_s": predicted_s, "idle": idle}

    def predict(self, group: Group, method: Method, cluster: str, number: int) -> float:
        """Predict the seconds per step of a case; several can be predicted at once."""
        virtual = self.out / f"virtual-{number}"
        self._prediction(group, method, cluster, virtual).finish()
        return seconds_per_step(virtual)

    def _prediction(self, group: Group, method: Method, cluster: str, virtual: Path) -> _Background:
        file = virtual.with_suffix(".toml")
        file.write_text(cluster)
        simulate = offbeat("simulate", *self._what(group), *self._job(group, method), "--cluster", file)
        return _Background([*simulate, "--workers", str(HOSTS), *self._written(virtual)])

    def _job(self, group: Group, method: Method) -> list[object]:
        return [*method.options, "--steps", self.steps_of(group)]

    def _train(self, group: Group, job: Sequence[object]) -> tuple[float, float]:
        """Train on the hosts; return the seconds per step, and the idle share of the cores meanwhile."""
        real = self.out / "real"
        env = {} if self.pieces is None else {PIECES: self.pieces}
        command = offbeat("train", *self._paced(group), *job, *self._written(real))
        with IdleCores() as idle:
            self.hosts.run(command, env=env, timeout=RUN_LIMIT_S, echo=False)
        step_s = seconds_per_step(real)
        steps_s = step_s * (self.steps_of(group) - WARM_UP)
        return step_s, idle.share(ENDING_S + IDLE_PART * steps_s, ENDING_S)

    def _written(self, folder: Path) -> list[str]:
        return ["--out", str(folder), "--log", str(log_of(folder))]

    def _what(self, group: Group) -> list[object]:
        return ["fashion-mnist", "--model", group.model.name, "--data", self.data, "--force", "--quiet"]

    def _paced(self, group: Group) -> list[object]:
        return [*self._what(group), "--pace", f"{group.model.pace_s}s", *STRAGGLERS[group.workers]]

    @property
    def _cluster(self) -> Path:
        return self.out / "cluster.toml"


class PredictionFailed(Exception):
    """`offbeat simulate` failed."""


class _Background:
    """A command that is started once, at the latest when its end is awaited."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        if self._process is None:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdout=pipe, stderr=pipe, text=True, env=env)
        return self._process

    def finish(self) -> None:
        """Wait for the end; raise an error if the command failed."""
        process = self.start()
        _, errors = process.communicate()
        if process.returncode:
            raise PredictionFailed(errors.strip()[-500:])

    def stop(self) -> None:
        """Kill the command if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def variant(options: argparse.Namespace) -> str:
    """Name what differs from the usual cases, for the files of results; "" if nothing does."""
    return f"pieces-{options.pieces}" if options.pieces else ""


def run_group(
    group: Group, raw: RawResults, part: str, measurement: Measurement, again: bool, parts: int = 1
) -> None:
    """Run the cases of a group that are not kept; keep each as soon as it is finished.

    Results of other code or of another machine are not mixed with new ones: they are replaced. Only
    `again` keeps the cases of this machine that were not chosen, with a mark of the code that ran them.
    """
    now = {"code": code_print(), "machine": machine()}
    kept = raw.get(part)
    if kept is not None and again and kept["machine"] == now["machine"]:
        kept = {**now, "cases": others_of(kept, group)}
    elif kept is None or again or any(kept[key] != value for key, value in now.items()):
        kept = {**now, "cases": {}}
    cases = kept["cases"]
    missing = [method for method in group.methods if not measurement.is_kept(group, cases.get(str(method)))]
    print(f"{group.name}: {len(missing)} of {len(group.methods)} cases are to be run", flush=True)
    if not missing:
        return
    kept["parts"] = max(parts, kept.get("parts", 1))
    measurement.hosts.set_rate(group.rate)
    if not set(group.codecs) <= set(kept.get("codecs", ())) or "cluster" not in kept:
        kept |= measurement.calibrate(group) | {"codecs": group.codecs}
        raw.keep(part, kept)
    for method in missing:
        found = measurement.run(group, method, kept["cluster"])
        cases[str(method)] = found
        raw.keep(part, kept)
        if "error" in found:
            print(f"{group.name}: {method} failed: {found['error']}", flush=True)
        else:
            ratio = found["predicted_s"] / statistics.median(found["measured_s"])
            print(f"{group.name}: {method}: predicted / measured {ratio:.3f}", flush=True)


def others_of(kept: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Return the kept cases that were not chosen, each with the code that ran it."""
    chosen = {str(method) for method in group.methods}
    cases = kept["cases"].items()
    return {name: {"code": kept["code"], **case} for name, case in cases if name not in chosen}


def predict_again(group: Group, raw: RawResults, part: str, measurement: Measurement) -> None:
    """Calibrate again, and predict the kept cases of a group anew; the real runs stay."""
    kept = raw.get(part)
    if kept is None or kept["machine"] != machine():
        print(f"{group.name}: no cases of this machine are kept", flush=True)
        return
    cases, of_runs = kept["cases"], kept["link"]
    known = [method for method in group.methods if measurement.is_kept(group, cases.get(str(method)))]
    if len(known) < len(cases):
        others = len(cases) - len(known)
        print(f"{group.name}: {others} kept cases failed, have other steps or were not chosen", flush=True)
        return
    measurement.hosts.set_rate(group.rate)
    kept |= measurement.calibrate(group) | {"codecs": group.codecs, "predicted_by": code_print()}
    kept["link"] = of_runs

    def predict(number: int) -> float:
        return measurement.predict(group, known[number], kept["cluster"], number)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        predicted = list(pool.map(predict, range(len(known))))
    for method, predicted_s in zip(known, predicted, strict=True):
        case = cases[str(method)]
        case["predicted_s"] = predicted_s
        ratio = predicted_s / statistics.median(case["measured_s"])
        print(f"{group.name}: {method}: predicted / measured {ratio:.3f}", flush=True)
    raw.keep(part, kept)


def list_cases(groups: Sequence[Group]) -> None:
    """Print all cases with estimates of their seconds."""
    for group in groups:
        print(f"{group.name}: {group.seconds / 60:.1f} min for {len(group.methods)} cases and a calibration")
        for method in group.methods:
            print(f"    {method}: {group.estimate_s(method):.0f} s")


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("prediction", __doc__)
    add_data_option(parser)
    add_part_option(parser, "groups of cases")
    names, models = list(dict.fromkeys(method.name for method in METHODS)), [model.name for model in MODELS]
    every = {"--rates": list(RATES), "--models": models, "--workers": list(STRAGGLERS), "--strategies": names}
    for option, choices in every.items():
        parser.add_argument(option, nargs="+", choices=choices, default=choices, help="default: all")
    parser.add_argument("--steps", type=int, metavar="N", help="a trial with so many steps, in runs/")
    parser.add_argument("--repeats", type=int, default=1, help="real runs of each case (default: 1)")
    parser.add_argument("--pieces", metavar="N|auto", help="OFFBEAT_PIECES, in both worlds; kept apart")
    parser.add_argument("--again", action="store_true", help="run the chosen kept cases again")
    parser.add_argument(
        "--predict-again", action="store_true", help="calibrate and predict kept cases again; run none"
    )
    parser.add_argument("--list", action="store_true", help="show the cases of the part, and run nothing")
    parser.add_argument("--table", action="store_true", help="write the table of what is kept; run nothing")
    options = parser.parse_args(arguments)
    chosen = select(options.rates, options.models, options.workers, options.strategies)
    groups = options.part.of(chosen, lambda group: group.seconds)
    raw, kind = RawResults(BENCHMARK, TRIALS if options.steps else None), variant(options)
    if options.list:
        list_cases(groups)
        return
    if not options.table:
        data = require_data(parser, options).absolute()
        exit_on_signals()
        with tempfile.TemporaryDirectory() as scratch, Hosts(count=HOSTS, rate=RATES[0]) as hosts:
            measurement = Measurement(
                hosts, data, Path(scratch), options.steps, options.repeats, options.pieces
            )
            for group in groups:
                name = f"{kind} {group.name}"
                if options.predict_again:
                    predict_again(group, raw, name, measurement)
                    continue
                run_group(group, raw, name, measurement, options.again, options.part.count)
    if options.table or options.part.count == 1:
        kept = {group: raw.get(f"{kind} {group.name}") for group in chosen}
        write_table(__doc__ or "", chosen, kept, kind, trial=bool(options.steps))
