"""SSP (Ho et al. 2013) and DSSP (Zhao et al. 2019): bounds of staleness, and the throughput gained."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Outcomes, Paper
from benchmarks.papers.figures import max_staleness, rate_ratio
from benchmarks.papers.gssp import training_run

base = replace(training_run("lenet5"), steps=200, batch_size=8, evaluations=0)
runs = {
    "bsp": (base,),
    "ssp": (replace(base, strategy="ssp", settings=("staleness=3",)),),
    "dssp": (replace(base, strategy="dssp", settings=("low=3", "high=15")),),
}


def faster(outcomes: Outcomes) -> str:
    """Format the throughput gained over BSP."""
    ratios = {name: 100 * (rate_ratio(outcomes, name, "bsp") - 1) for name in ("ssp", "dssp")}
    return f"SSP(3) {ratios['ssp']:+.0f}% over BSP, DSSP {ratios['dssp']:+.0f}%"


PAPER = Paper(
    name="ssp",
    title="SSP, DSSP",
    claims=[
        Claim(
            claim="staleness is bounded: by s, or by low + r_max",
            mark="paper",
            figure="low 3, r_max 12",
            source="Paper: low 3, r_max 12.",
            runs=runs,
            ours=lambda outcomes: (
                f"largest staleness under SSP(3): {max_staleness(outcomes, 'ssp')} steps;"
                f" DSSP(3, 15): {max_staleness(outcomes, 'dssp')}"
            ),
            settings="LeNet-5/MNIST on paper-gssp, 16 workers, 200 steps",
            why="a bound must hold, but need not be reached",
        ),
        Claim(
            claim="throughput, where some workers are always slower",
            mark="paper",
            figure="",
            runs=runs,
            ours=faster,
            settings="as above; each worker's own rate until it is done, added up",
            why="our source has no figure. In the end the slowest worker sets the pace",
        ),
    ],
)
