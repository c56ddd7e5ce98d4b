"""Oscars (Huang 2021): only the abstract was available; its claims are in words, without figures."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Paper
from benchmarks.papers.figures import byte_ratio, compare_scores, compute_fraction, rate_ratio
from benchmarks.papers.gssp import training_run

WORDS = "raises utilisation, lowers communication, keeps accuracy"
SETTINGS = (
    "LeNet-5/MNIST on paper-gssp (steps take 1, 1.5, 2 and 4 times as long), 16 workers, 300 steps of 64, τ 4"
)
RECONSTRUCTED = "the algorithm is our reconstruction: no figure may be called Oscars'"

bsp = training_run("lenet5")
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
                f"workers compute {compute_fraction(outcomes, 'oscars')} of their time, under BSP"
                f" {compute_fraction(outcomes, 'bsp')};"
                f" {rate_ratio(outcomes, 'oscars', 'bsp'):.2f}x the samples per second"
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
            ours=lambda outcomes: f"{byte_ratio(outcomes, 'oscars', 'bsp')} of BSP's bytes for equal steps",
            settings=SETTINGS,
            why=RECONSTRUCTED,
        ),
        Claim(
            claim="keeps accuracy",
            mark="abstract",
            figure="",
            source=WORDS,
            runs=runs,
            ours=lambda outcomes: compare_scores(outcomes, "oscars"),
            settings=f"{SETTINGS}; all workers take the same number of steps",
            why=RECONSTRUCTED,
        ),
    ],
)
