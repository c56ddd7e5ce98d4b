"""Oscars (Huang 2021): only its abstract was to be had, which has no figure. Its claims are in words."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Paper
from benchmarks.papers.figures import against, busy, byte_ratio, rate_ratio
from benchmarks.papers.gssp import trained

WORDS = "raises utilisation, lowers communication, keeps accuracy"
SETTINGS = (
    "LeNet-5/MNIST on paper-gssp (steps of 1, 1.5, 2 and 4 times as long), 16 workers, 300 steps of 64, τ 4"
)
RECONSTRUCTED = "the algorithm is our reconstruction: no figure may be called Oscars'"

bsp = trained("lenet5")
runs = {"bsp": bsp.seeds(3), "oscars": replace(bsp, strategy="oscars").seeds(3)}
PAPER = Paper(
    name="oscars",
    title="Oscars",
    claims=[
        Claim(
            claim="raises utilisation",
            mark="abstract",
            figure="",
            source=WORDS,
            runs=runs,
            ours=lambda outcomes: (
                f"workers compute {busy(outcomes, 'oscars')} of their time, under BSP"
                f" {busy(outcomes, 'bsp')}; {rate_ratio(outcomes, 'oscars', 'bsp'):.2f}× the samples a second"
            ),
            settings=SETTINGS,
            why=RECONSTRUCTED,
        ),
        Claim(
            claim="lowers communication",
            mark="abstract",
            figure="",
            source=WORDS,
            runs=runs,
            ours=lambda outcomes: f"{byte_ratio(outcomes, 'oscars', 'bsp')} of BSP's bytes for as many steps",
            settings=SETTINGS,
            why=RECONSTRUCTED,
        ),
        Claim(
            claim="keeps accuracy",
            mark="abstract",
            figure="",
            source=WORDS,
            runs=runs,
            ours=lambda outcomes: against(outcomes, "oscars"),
            settings=f"{SETTINGS}; all workers make as many steps",
            why=RECONSTRUCTED,
        ),
    ],
)
