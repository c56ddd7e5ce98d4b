"""OSP (Chen et al., ICPP 2023): 9 nodes, PyTorch; our source does not name models, network and baselines.

Here: ResNet-18 and LeNet-5 on nine workers in a ring, or on eight and a server with one NIC, at 1 Gbit/s.
K is the time of the exchange: an all-reduce, or all pushes through the server's NIC.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Outcomes, Paper, Run, ring_s, server_s
from benchmarks.papers.figures import compare_scores, step_ratio

BITS_PER_S = 1e9
MORE = "up to 50% more throughput without accuracy loss over popular synchronization models"
LGP = 'Local-Gradient-based Parameter correction (LGP) "to avoid accuracy loss caused by stale parameters"'
ON_RING = (0.5, 0.67, 1.0, 1.5, 2.0, 4.0)
AT_SERVER = (0.25, 0.5, 1.0, 2.0)
SERVED = {
    "bsp": ("ssp", ("staleness=0",)),
    "ssp": ("ssp", ("staleness=3",)),
    "asp": ("asp", ()),
    "osp": ("osp", ("on=server", "growth=0")),
}


def timed_run(strategy: str, settings: tuple[str, ...], cluster: str, workers: int, step_s: float) -> Run:
    """Return a run of ResNet-18 that is only timed."""
    return Run(
        task="cifar10",
        model="resnet18",
        strategy=strategy,
        settings=settings,
        cluster=cluster,
        workers=workers,
        step_s=step_s,
        steps=45,
        batch_size=2,
    )


def ring_runs(ratio: float) -> dict[str, tuple[Run, ...]]:
    """Return the runs with nine workers in a ring at one K/C."""
    step_s = ring_s("resnet18", 9, BITS_PER_S) / ratio
    return {
        f"bsp@{ratio:g}": (timed_run("bsp", (), "lan-1g", 9, step_s),),
        f"osp@{ratio:g}": (timed_run("osp", ("growth=0",), "lan-1g", 9, step_s),),
    }


def server_runs(ratio: float) -> dict[str, tuple[Run, ...]]:
    """Return the runs with eight workers and a server at one K/C."""
    step_s = server_s("resnet18", 8, BITS_PER_S) / ratio
    return {
        f"{name}@{ratio:g}": (timed_run(strategy, settings, "paper-osp", 8, step_s),)
        for name, (strategy, settings) in SERVED.items()
    }


def gain(outcomes: Outcomes, ratio: float, other: str) -> str:
    """Format the throughput gained over another strategy at one K/C."""
    return f"{100 * (step_ratio(outcomes, f'osp@{ratio:g}', f'{other}@{ratio:g}') - 1):+.0f}%"


def on_ring(outcomes: Outcomes) -> str:
    """Format the throughput gained in a ring at each K/C."""
    return "over BSP: " + "; ".join(f"K/C {ratio:g}: {gain(outcomes, ratio, 'bsp')}" for ratio in ON_RING)


def at_server(outcomes: Outcomes) -> str:
    """Format the throughput gained with a server at each K/C."""
    return "over BSP / SSP(3) / ASP: " + "; ".join(
        f"K/C {ratio:g}: {' / '.join(gain(outcomes, ratio, other) for other in ('bsp', 'ssp', 'asp'))}"
        for ratio in AT_SERVER
    )


def training_runs(model: str, seeds: int) -> dict[str, tuple[Run, ...]]:
    """Return the runs that train a model under BSP, OSP, and OSP without correction."""
    shared = {
        "cluster": "lan-1g",
        "workers": 9,
        "evaluations": 8,
        "model": model,
        "strategy": "bsp",
        "batch_size": 32,
    }
    if model == "lenet5":
        bsp = Run(task="mnist", steps=200, lr=0.02, **shared)
    else:
        step_s = ring_s(model, 9, BITS_PER_S)
        bsp = Run(task="cifar10", steps=640, lr=0.05, step_s=step_s, **shared)
    late = ("budget=0.8", f"growth={bsp.steps // 10}")
    return {
        "bsp": bsp.seeds(seeds),
        "osp": replace(bsp, strategy="osp", settings=late).seeds(seeds),
        "none": replace(bsp, strategy="osp", settings=(*late, "correction=none")).seeds(seeds),
    }


def accuracy(model: str, name: str, seeds: int) -> list[Claim]:
    """Return the claims about a model's accuracy."""
    runs = training_runs(model, seeds)
    bsp = runs["bsp"][0]
    settings = f"9 workers, {bsp.steps} steps of 32 samples, rate {bsp.lr:g}; up to 0.8 of the bytes late"
    short = "models and length of the runs are ours; which blocks are late is decided by our reconstruction"
    return [
        Claim(
            claim=f"{name}: no accuracy lost",
            mark="abstract",
            figure="without accuracy loss",
            source=MORE,
            runs={strategy: runs[strategy] for strategy in ("bsp", "osp")},
            ours=lambda outcomes: compare_scores(outcomes, "osp"),
            settings=settings,
            why=short,
        ),
        Claim(
            claim=f"{name}: LGP avoids the loss of accuracy by stale parameters",
            mark="abstract",
            figure="",
            source=LGP,
            runs=runs,
            ours=lambda outcomes: (
                f"without LGP {compare_scores(outcomes, 'none')}; with it {compare_scores(outcomes, 'osp')}"
            ),
            settings=settings,
            why=short,
        ),
    ]


LIMIT = "a step that sends BSP's bytes takes at least max(C, K)"
PAPER = Paper(
    name="osp",
    title="OSP",
    claims=[
        Claim(
            claim="more throughput, workers in a ring",
            mark="abstract",
            figure="up to 50%",
            source=MORE,
            runs={name: runs for ratio in ON_RING for name, runs in ring_runs(ratio).items()},
            ours=on_ring,
            settings="ResNet-18, 9 workers, lan-1g; 45 steps timed, the last 15 count",
            why=f"our BSP overlaps communication with backward: at K = C there is 33% to gain, as {LIMIT}",
        ),
        Claim(
            claim="more throughput, a server with one NIC",
            mark="abstract",
            figure="up to 50%",
            source=MORE,
            runs={name: runs for ratio in AT_SERVER for name, runs in server_runs(ratio).items()},
            ours=at_server,
            settings="ResNet-18, 8 workers and a server, paper-osp; 45 steps timed, the last 15 count",
            why="BSP through a server pushes, waits and pulls, and hides nothing; SSP and ASP pull while they"
            " compute, at the price of staleness",
        ),
        *accuracy("lenet5", "LeNet-5/MNIST", 3),
        *accuracy("resnet18", "ResNet-18/CIFAR-10", 2),
    ],
)
