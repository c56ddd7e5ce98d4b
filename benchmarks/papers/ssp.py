"""SSP (Ho et al. 2013) and DSSP (Zhao et al. 2019): their bounds, and what DSSP's credit is worth."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Outcomes, Paper
from benchmarks.papers.figures import rate_ratio, stalest
from benchmarks.papers.gssp import trained

base = replace(trained("lenet5"), steps=200, batch_size=8, looks=0)
runs = {
    "bsp": (base,),
    "ssp": (replace(base, strategy="ssp", settings=("staleness=3",)),),
    "dssp": (replace(base, strategy="dssp", settings=("low=3", "high=15")),),
}


def worth(outcomes: Outcomes) -> str:
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
                f"stalest read under SSP(3): {stalest(outcomes, 'ssp')} clocks behind;"
                f" DSSP(3, 15): {stalest(outcomes, 'dssp')}"
            ),
            settings="LeNet-5/MNIST on paper-gssp, 16 workers, 200 steps",
            why="a bound is a rule: it has to hold, and need not be reached",
        ),
        Claim(
            claim="what that is worth, where some workers are always slower",
            mark="paper",
            figure="",
            runs=runs,
            ours=worth,
            settings="as above: each worker's own rate while it has steps to do, added up",
            why="our source has no figure. In the end the slowest sets the pace; a bound only delays that",
        ),
    ],
)
