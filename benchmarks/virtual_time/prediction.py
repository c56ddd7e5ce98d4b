"""Does virtual time predict real step times?

    python -m benchmarks run prediction --data FOLDER

On four emulated hosts, for each rate and model: `offbeat calibrate` on the hosts, `offbeat train` there under
each strategy, then `offbeat simulate` on the calibrated cluster. The table compares predicted with measured
seconds per step; the goal is within 10%. Computation is paced, so that two cores can stand for four machines.
A calibration measures the model, not the strategy or its settings.
"""

from __future__ import annotations

import json
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
STRATEGIES = {"bsp": [], "local_sgd": ["--set", "period=4"]}
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
    folder = require_data(parser, parser.parse_args(arguments))
    table = Table(
        "prediction",
        __doc__ or "",
        [
            "rate",
            "model",
            "strategy",
            "measured ms per step",
            "predicted ms per step",
            "predicted / measured",
        ],
    )
    with tempfile.TemporaryDirectory() as scratch, Hosts(count=HOSTS, rate=RATES[0]) as hosts:
        out = Path(scratch)
        for rate in RATES:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            for model, pace in MODELS.items():
                what = ["fashion-mnist", "--model", model, "--data", folder, "--force"]
                paced = [*what, "--pace", pace]
                cluster = out / f"{rate}-{model}.toml"
                hosts.run(offbeat("calibrate", *paced, "--out", cluster), timeout=300, echo=False)
                for strategy, settings in STRATEGIES.items():
                    job = ["--strategy", strategy, *settings, "--steps", STEPS[rate], "--work", "equal"]
                    real, virtual = out / "real", out / "virtual"
                    command = offbeat("train", *paced, *job, "--out", real)
                    hosts.run(command, timeout=600, echo=False)
                    run = offbeat("simulate", *what, *job, "--cluster", cluster, "--workers", HOSTS)
                    subprocess.run([*run, "--out", virtual], check=True, capture_output=True)
                    measured, predicted = seconds_per_step(real), seconds_per_step(virtual)
                    table.row(
                        rate,
                        f"{model}, paced {pace}",
                        " ".join([strategy, *settings[1:]]),
                        f"{1e3 * measured:.1f}",
                        f"{1e3 * predicted:.1f}",
                        f"{predicted / measured:.3f}",
                    )
    table.write()
