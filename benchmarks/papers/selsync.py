"""SelSync (Tyagi & Swany, CLUSTER 2023): 16 workers on 5 Gbit/s.

The paper does not state the computation time C of a step. It is chosen so that K/C (K: seconds of an
all-reduce) makes the paper's own speed-up S and LSSR L agree, if nothing overlaps and both need the same
number of steps: (C + K) / (C + (1 − L)K) = S.

SelSync's decisions depend on gradients, not on time. So its step time at any K/C is a mix of the time of a
local step and that of a step with an average, both timed there, weighted by the LSSR of the trained run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from benchmarks.papers.claims import Claim, Outcomes, Paper, Run, ring_s
from benchmarks.papers.figures import compare_scores, lssr, speedup_for_steps, speedup_to_score

WORKERS = 16
BITS_PER_S = 5e9
OUR_BSP = "our BSP overlaps communication with backward"
SMALLER = {
    "resnet18": "ResNet-18 instead of ResNet101",
    "vgg11": "VGG-11 on CIFAR-10 instead of CIFAR-100",
    "transformer": "WikiText-2 instead of WikiText-103, a narrower Transformer",
}


def implied_ratio(lssr_of_paper: float, speed_up: float) -> float:
    """Return the K/C at which an LSSR leads to a speed-up."""
    return (speed_up - 1) / (1 - speed_up * (1 - lssr_of_paper))


def training_run(model: str, ratio: float) -> Run:
    """Return the run that trains a model under BSP."""
    shared = {
        "cluster": "paper-selsync",
        "step_s": ring_s(model, WORKERS, BITS_PER_S) / ratio,
        "evaluations": 8,
    }
    if model == "transformer":
        return Run(task="wikitext2", model=model, strategy="bsp", steps=400, batch_size=20, **shared)
    steps = 640 if model == "resnet18" else 480
    return Run(task="cifar10", model=model, strategy="bsp", steps=steps, batch_size=32, lr=0.05, **shared)


def with_selsync(run: Run, *settings: str, order: str = "seldp") -> Run:
    """Return the same run under SelSync."""
    return replace(run, strategy="selsync", settings=settings, order=order)


def timed_runs(run: Run, ratios: tuple[float, ...]) -> dict[str, tuple[Run, ...]]:
    """Return the runs that time a BSP step, a SelSync step with an average and one without, at each K/C."""
    always, never = ("delta=0", "window=2"), ("delta=1e9", "window=2")
    runs: dict[str, tuple[Run, ...]] = {}
    for ratio in ratios:
        step_s = ring_s(run.model, WORKERS, BITS_PER_S) / ratio
        base = replace(run, steps=12, batch_size=2, evaluations=0, step_s=step_s)
        runs |= {
            f"bsp@{ratio:.3g}": (base,),
            f"average@{ratio:.3g}": (with_selsync(base, *always, order="shuffled"),),
            f"local@{ratio:.3g}": (with_selsync(base, *never, order="shuffled"),),
        }
    return runs


def sweep(ratios: tuple[float, ...], of_paper: float) -> Callable[[Outcomes], str]:
    """Return a function that formats the speed-ups over averaging at every step and over BSP."""

    def figure(outcomes: Outcomes) -> str:
        ours = statistics.mean(outcome["lssr"] for outcome in outcomes["selsync"])
        parts = []
        for ratio in ratios:
            bsp, average, local = (
                outcomes[f"{name}@{ratio:.3g}"][0]["late_step_s"] for name in ("bsp", "average", "local")
            )
            mixed = {lssr: lssr * local + (1 - lssr) * average for lssr in (ours, of_paper)}
            parts.append(
                f"K/C {ratio:.2g}: {average / mixed[ours]:.2f}×, over BSP {bsp / mixed[ours]:.2f}×"
                f" (with the paper's LSSR {average / mixed[of_paper]:.2f}× and {bsp / mixed[of_paper]:.2f}×)"
            )
        return "over averaging at every step, without overlap: " + "; ".join(parts)

    return figure


def model_claims(
    model: str, name: str, figures: tuple[str, float, float], source: str, seeds: int
) -> list[Claim]:
    """Return the claims that training one model checks."""
    scores, of_paper, speed_up = figures
    ratio = implied_ratio(of_paper, speed_up)
    bsp = training_run(model, ratio)
    both = {"bsp": bsp.seeds(seeds), "selsync": with_selsync(bsp, "delta=0.3").seeds(seeds)}
    ratios = (0.5, 2.0, ratio) if ratio > 2 else (0.5, ratio, 4.0)
    size = f"{WORKERS} workers, {bsp.steps} steps of {bsp.batch_size} samples"
    settings = f"δ 0.3, SelDP, {size}, constant learning rate; K/C {ratio:.2g}"
    short = f"{SMALLER[model]}; a few epochs at a constant learning rate; the paper trained to the end"
    return [
        Claim(
            claim=f"{name}: as good as BSP",
            mark="paper",
            figure=scores,
            source=source,
            runs=both,
            ours=lambda outcomes: compare_scores(outcomes, "selsync"),
            settings=settings,
            why=short,
        ),
        Claim(
            claim=f"{name}: LSSR",
            mark="paper",
            figure=f"{of_paper:.3f}".lstrip("0"),
            source=source,
            runs=both,
            ours=lambda outcomes: lssr(outcomes, "selsync"),
            settings=settings,
            why="LSSR depends on how gradient norms change, so on model, learning rate and run length; "
            "ours includes the first 25 steps, which always synchronize",
        ),
        Claim(
            claim=f"{name}: faster than BSP",
            mark="paper",
            figure=f"{speed_up:.2f}×",
            source=source,
            runs=both,
            ours=lambda outcomes: (
                f"{speedup_for_steps(outcomes, 'selsync')} for the same number of steps,"
                f" {speedup_to_score(outcomes, 'selsync')} until the score that both reach"
            ),
            settings=settings,
            why=f"{OUR_BSP}; evaluations are rare, so the time to a score is coarse",
        ),
        Claim(
            claim=f"{name}: the same at other K/C",
            mark="paper",
            figure=f"{speed_up:.2f}×",
            source=source,
            runs={**both, **timed_runs(bsp, ratios)},
            ours=sweep(ratios, of_paper),
            settings=f"12 steps timed at each K/C, mixed by LSSR; at {ratio:.2g} the paper's S and L agree",
            why=OUR_BSP,
        ),
    ]


RESNET = "ResNet101/CIFAR-10 98.62 vs 98.5%, LSSR .829, 2.03×"
VGG = "VGG11/CIFAR-100 91.33 vs 90.9, LSSR .912, 6.16×"
TRANSFORMER = "Transformer/WikiText-103 perplexity 89.91 vs 90.02, LSSR .725, 2.42×"
ORDERS = "Paper, SelDP/DefDP: ResNet101 97.6/96.8, VGG11 90.86/64.1."


def order_claim(model: str, ratio: float, name: str, figure: str) -> Claim:
    """Return the claim that SelDP beats DefDP for one model."""
    bsp = training_run(model, ratio)
    return Claim(
        claim=f"{name}: SelDP beats DefDP",
        mark="paper",
        figure=figure,
        source=ORDERS,
        runs={
            "SelDP": (with_selsync(bsp, "delta=0.3"),),
            "DefDP": (with_selsync(bsp, "delta=0.3", order="defdp"),),
        },
        ours=lambda outcomes: compare_scores(outcomes, "SelDP", "DefDP"),
        settings="as above; with DefDP each worker has its own random sixteenth of the data",
        why=f"{SMALLER[model]}; in a few epochs a worker sees few chunks, and little of its own chunk twice",
    )


resnet_ratio, vgg_ratio = implied_ratio(0.829, 2.03), implied_ratio(0.912, 6.16)
PAPER = Paper(
    name="selsync",
    title="SelSync",
    claims=[
        *model_claims("resnet18", "ResNet101/CIFAR-10", ("98.62 vs 98.5%", 0.829, 2.03), RESNET, 2),
        order_claim("resnet18", resnet_ratio, "ResNet101", "97.6/96.8"),
        Claim(
            claim="GA (averaging gradients) is worse than PA (averaging weights)",
            mark="paper",
            figure="",
            source="worse in the paper",
            runs={
                "PA": (with_selsync(training_run("resnet18", resnet_ratio), "delta=0.3"),),
                "GA": (
                    with_selsync(training_run("resnet18", resnet_ratio), "delta=0.3", "aggregate=gradients"),
                ),
            },
            ours=lambda outcomes: compare_scores(outcomes, "GA", "PA"),
            settings="ResNet-18, as above",
            why="",
        ),
        *model_claims("vgg11", "VGG11/CIFAR-100", ("91.33 vs 90.9", 0.912, 6.16), VGG, 1),
        order_claim("vgg11", vgg_ratio, "VGG11", "90.86/64.1"),
        Claim(
            claim="VGG11, δ 0.5: faster than BSP",
            mark="paper",
            figure="14×",
            source="The famous 14× (VGG11, δ=.5)",
            runs={
                "bsp": (training_run("vgg11", vgg_ratio),),
                "selsync": (with_selsync(training_run("vgg11", vgg_ratio), "delta=0.5"),),
            },
            ours=lambda outcomes: (
                f"{speedup_for_steps(outcomes, 'selsync')} for the same number of steps, LSSR"
                f" {lssr(outcomes, 'selsync')}; {compare_scores(outcomes, 'selsync')}"
            ),
            settings=f"as above, K/C {vgg_ratio:.2g}",
            why="the paper's own table does not support it either: with free local steps it allows at most"
            f" 2.1×; {OUR_BSP}",
        ),
        *model_claims(
            "transformer", "Transformer/WikiText-103", ("89.91 vs 90.02", 0.725, 2.42), TRANSFORMER, 1
        ),
    ],
    unchecked="AlexNet/ImageNet (86.72 vs 85.15 top-5, LSSR .954, 4.62×): ImageNet is not available here.",
)
