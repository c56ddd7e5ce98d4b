"""Does virtual time predict real step times?

    python -m benchmarks run prediction --data FOLDER

On four emulated hosts, for each rate and model: `offbeat calibrate` on the hosts, `offbeat train` there under
each strategy, then `offbeat simulate` on the calibrated cluster. The table compares predicted with measured
seconds per step; the goal is within 7%. Computation is paced, so that two cores can stand for four machines.
A calibration measures the model, not the strategy or its settings. `--repeats` trains several times: the
table then has the median, and the least and the greatest.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.hosts import Hosts
from benchmarks.support.options import add_data_option, benchmark_parser, require_data
from benchmarks.support.tables import Table

RATES = ("1gbit", "200mbit", "50mbit")
MODELS = {"mlp": "60ms", "cnn": "200ms"}
STRATEGIES = {
    "bsp": [],
    "local_sgd": ["--set", "period=4"],
    "ssp": [],
    "asp": [],
    "oscars": [],
}
HOSTS = 4
STEPS = {"1gbit": 60, "200mbit": 40, "50mbit": 24}


def offbeat(*arguments: object) -> list[str]:
    """Return the command `offbeat` with these arguments."""
    return [sys.executable, "-m", "offbeat", *map(str, arguments)]


def seconds_per_step(folder: Path) -> float:
    """Read the seconds per step from a run's summary."""
    summary = json.loads((folder / "summary.json").read_text())
    return float(summary["seconds"] / summary["steps"])


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("prediction", __doc__)
    add_data_option(parser)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=RATES, help="default: all")
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all"
    )
    parser.add_argument(
        "--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES), help="default: all"
    )
    parser.add_argument("--slow", metavar="RANK=FACTOR", help="make one rank a straggler")
    parser.add_argument("--repeats", type=int, default=1, help="real runs of each case (default: 1)")
    options = parser.parse_args(arguments)
    folder = require_data(parser, options)
    table = Table(
        "prediction",
        __doc__ or "",
        [
            "rate",
            "model",
            "strategy",
            "measured ms per step",
            "least and greatest",
            "predicted ms per step",
            "predicted / measured",
        ],
    )
    with tempfile.TemporaryDirectory() as scratch, Hosts(count=HOSTS, rate=options.rates[0]) as hosts:
        out = Path(scratch)
        for rate in options.rates:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            for model in options.models:
                pace = MODELS[model]
                what = ["fashion-mnist", "--model", model, "--data", folder, "--force"]
                paced = [*what, "--pace", pace, *(["--slow", options.slow] if options.slow else [])]
                cluster = out / f"{rate}-{model}.toml"
                hosts.run(offbeat("calibrate", *paced, "--out", cluster), timeout=300, echo=False)
                for strategy in options.strategies:
                    settings = STRATEGIES[strategy]
                    job = ["--strategy", strategy, *settings, "--steps", STEPS[rate], "--work", "equal"]
                    real, virtual = out / "real", out / "virtual"
                    runs = []
                    for _ in range(options.repeats):
                        hosts.run(offbeat("train", *paced, *job, "--out", real), timeout=600, echo=False)
                        runs.append(seconds_per_step(real))
                    run = offbeat("simulate", *what, *job, "--cluster", cluster, "--workers", HOSTS)
                    subprocess.run([*run, "--out", virtual], check=True, capture_output=True)
                    measured, predicted = statistics.median(runs), seconds_per_step(virtual)
                    table.row(
                        rate,
                        f"{model}, paced {pace}" + (f", rank {options.slow}" if options.slow else ""),
                        " ".join([strategy, *settings[1:]]),
                        f"{1e3 * measured:.1f}",
                        f"{1e3 * min(runs):.1f} to {1e3 * max(runs):.1f}",
                        f"{1e3 * predicted:.1f}",
                        f"{predicted / measured:.3f}",
                    )
    table.write()
