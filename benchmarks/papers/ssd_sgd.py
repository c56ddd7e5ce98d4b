"""SSD-SGD (Xu et al., ACM TACO): CIFAR-10 and ImageNet; our source does not name cluster and baseline.

Here: 8 workers at 1 Gbit/s, with collectives, or with a server that has one NIC, as the authors used servers.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Outcomes, Paper, Run, ring_s, server_s
from benchmarks.papers.figures import compare_scores, step_ratio

BITS_PER_S = 1e9
WORKERS = 8
FASTER = "Up to 110% faster."
WARM_UPS = (2, 8)  # fractions of the run: 1/2 and 1/8
MODELS = (("lenet5", "LeNet-5/MNIST", 3), ("resnet18", "ResNet-18/CIFAR-10", 2))  # and seeds
THEIRS = (
    "our source has no figure. The code warms up for 500 steps, too long for short runs. Local steps have no"
    " momentum, the server's have, so the local weights fall behind between two pulls"
)
TIED = "not the paper's: α = (1 − β)/(1 − μ), local steps as long as those of w_glob in the steady state"
OURS = "not the paper's: the optimizer's state is pulled with the weights"
RULES: dict[str, tuple[tuple[str, ...], str]] = {
    "α 2 (the code's)": (("rule=authors", "alpha=2.0"), THEIRS),
    "α 1 (its other variant)": (("rule=authors", "alpha=1.0"), THEIRS),
    "α 5 (from the momentum)": (("rule=authors",), TIED),
    "the state carried (our default)": ((), OURS),
}
RATIOS = (0.5, 1.0, 2.0, 4.0)


def timed_runs(ratio: float, served: bool) -> dict[str, tuple[Run, ...]]:
    """Return the runs that time BSP and SSD-SGD at one K/C, with a server or with collectives."""
    k_s = (server_s if served else ring_s)("resnet18", WORKERS, BITS_PER_S)
    bsp = Run(
        task="cifar10",
        model="resnet18",
        strategy="ssp" if served else "bsp",
        settings=("staleness=0",) if served else (),
        cluster="paper-osp" if served else "lan-1g",
        workers=WORKERS,
        step_s=k_s / ratio,
        steps=45,
        batch_size=2,
    )
    settings = ("warmup=5", "on=server") if served else ("warmup=5",)
    return {
        f"bsp@{ratio:g}": (bsp,),
        f"ssd_sgd@{ratio:g}": (replace(bsp, strategy="ssd_sgd", settings=settings),),
    }


def faster(outcomes: Outcomes) -> str:
    """Format the throughput gained over BSP at each K/C."""
    gains = {ratio: step_ratio(outcomes, f"ssd_sgd@{ratio:g}", f"bsp@{ratio:g}") - 1 for ratio in RATIOS}
    return "over BSP: " + "; ".join(f"K/C {ratio:g}: {100 * gain:+.0f}%" for ratio, gain in gains.items())


def training_runs(model: str, seeds: int, warm_up: int, rule: tuple[str, ...]) -> dict[str, tuple[Run, ...]]:
    """Return the runs that train a model under BSP and under SSD-SGD."""
    shared = {"cluster": "lan-1g", "workers": WORKERS, "evaluations": 8, "model": model, "strategy": "bsp"}
    if model == "lenet5":
        bsp = Run(task="mnist", steps=240, batch_size=32, lr=0.02, **shared)
    else:
        step_s = ring_s(model, WORKERS, BITS_PER_S)
        bsp = Run(task="cifar10", steps=640, batch_size=32, lr=0.02, step_s=step_s, **shared)
    settings = (f"warmup={bsp.steps // warm_up}", *rule)
    delayed = replace(bsp, strategy="ssd_sgd", settings=settings)
    return {"bsp": bsp.seeds(seeds), "ssd_sgd": delayed.seeds(seeds)}


def accuracy(model: str, name: str, seeds: int, warm_up: int, rule: str) -> Claim:
    """Return the claim about a model's accuracy, with one warm-up and one rule for local steps."""
    setting, why = RULES[rule]
    runs = training_runs(model, seeds, warm_up, setting)
    return Claim(
        claim=f"{name}: accuracy compared with BSP, 1/{warm_up} of the run as warm-up, {rule}",
        mark="code",
        figure="",
        runs=runs,
        ours=lambda outcomes: compare_scores(outcomes, "ssd_sgd"),
        settings=f"8 workers, {runs['bsp'][0].steps} steps of 32, rate 0.02, momentum 0.9, k 5",
        why=why,
    )


UNKNOWN = "our source does not name the baseline or K/C"
PAPER = Paper(
    name="ssd_sgd",
    title="SSD-SGD",
    claims=[
        Claim(
            claim="faster, a server with one NIC",
            mark="abstract",
            figure="up to 110%",
            source=FASTER,
            runs={name: runs for ratio in RATIOS for name, runs in timed_runs(ratio, True).items()},
            ours=faster,
            settings="ResNet-18, 8 workers and a server on paper-osp, k 5; 45 steps timed, the last 15 count",
            why=f"{UNKNOWN}. BSP through a server pushes, waits and pulls; SSD-SGD hides both, and pulls once"
            " every 5 steps",
        ),
        Claim(
            claim="faster, on collectives",
            mark="abstract",
            figure="up to 110%",
            source=FASTER,
            runs={name: runs for ratio in RATIOS for name, runs in timed_runs(ratio, False).items()},
            ours=faster,
            settings="ResNet-18, 8 workers on lan-1g, k 5; 45 steps timed, the last 15 count",
            why=f"{UNKNOWN}. Our BSP takes C/3 + max(2C/3, K), SSD-SGD at least max(C, 0.7 K)",
        ),
        *(
            accuracy(model, name, seeds, warm_up, rule)
            for model, name, seeds in MODELS
            for warm_up in WARM_UPS
            for rule in RULES
        ),
    ],
    unchecked="ImageNet is not available here.",
)
