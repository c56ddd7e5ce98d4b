"""Does virtual time predict real time?

    python -m benchmarks.prediction --data DIR

On 4 shaped hosts, for each rate and model: `offbeat calibrate` on the hosts, `offbeat train` there under each
strategy, `offbeat simulate` on the calibrated cluster; predicted seconds a step against measured ones. The
goal is within 10%. Computation is paced, so that two cores can stand for four machines; a calibration is of
the model, not of the strategy or its settings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.hosts import Hosts
from benchmarks.tables import Table

RATES = ("1gbit", "200mbit", "50mbit")
MODELS = {"mlp": "60ms", "cnn": "200ms"}
STRATEGIES = {"bsp": [], "local_sgd": ["--set", "period=4"]}
HOSTS = 4
STEPS = {"1gbit": 60, "200mbit": 40, "50mbit": 24}


def offbeat(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "offbeat", *map(str, arguments)]


def seconds_a_step(folder: Path) -> float:
    summary = json.loads((folder / "summary.json").read_text())
    return float(summary["seconds"] / summary["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("OFFBEAT_DATA"))
    options = parser.parse_args()
    if not options.data:
        parser.error("the Fashion-MNIST files are needed: give --data DIR, or set OFFBEAT_DATA")
    table = Table(
        "prediction",
        __doc__ or "",
        ["rate", "model", "strategy", "measured ms a step", "predicted ms a step", "predicted / measured"],
    )
    with tempfile.TemporaryDirectory() as scratch, Hosts(count=HOSTS, rate=RATES[0]) as hosts:
        out = Path(scratch)
        for rate in RATES:
            hosts.set_rate(rate)
            table.note(hosts.describe_link())
            for model, pace in MODELS.items():
                what = ["fashion-mnist", "--model", model, "--data", options.data, "--force"]
                paced = [*what, "--pace", pace]
                cluster = out / f"{rate}-{model}.toml"
                hosts.run(offbeat("calibrate", *paced, "--out", cluster), timeout=300, echo=False)
                for strategy, settings in STRATEGIES.items():
                    job = ["--strategy", strategy, *settings, "--steps", STEPS[rate]]
                    real, virtual = out / "real", out / "virtual"
                    command = offbeat("train", *paced, *job, "--out", real)
                    hosts.run(command, timeout=600, echo=False)
                    run = offbeat("simulate", *what, *job, "--cluster", cluster, "--workers", HOSTS)
                    subprocess.run([*run, "--out", virtual], check=True, capture_output=True)
                    measured, predicted = seconds_a_step(real), seconds_a_step(virtual)
                    table.row(
                        rate,
                        f"{model}, paced {pace}",
                        " ".join([strategy, *settings[1:]]),
                        f"{1e3 * measured:.1f}",
                        f"{1e3 * predicted:.1f}",
                        f"{predicted / measured:.3f}",
                    )
    table.write()


if __name__ == "__main__":
    main()
