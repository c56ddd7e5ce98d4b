"""OSP (Chen et al., ICPP 2023): 9 nodes, PyTorch; models, network and baselines are not in our source.

Here they are ResNet-18 and LeNet-5; nine workers in a ring, or eight and a server with one NIC, at 1 Gbit/s.
K is what the exchange takes: an all-reduce, or all pushes through the server's NIC.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.claims import Claim, Outcomes, Paper, Run, ring_s, server_s
from benchmarks.papers.figures import against, step_ratio

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


def timed(strategy: str, settings: tuple[str, ...], cluster: str, workers: int, step_s: float) -> Run:
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


def ring(ratio: float) -> dict[str, tuple[Run, ...]]:
    step_s = ring_s("resnet18", 9, BITS_PER_S) / ratio
    return {
        f"bsp@{ratio:g}": (timed("bsp", (), "lan-1g", 9, step_s),),
        f"osp@{ratio:g}": (timed("osp", ("growth=0",), "lan-1g", 9, step_s),),
    }


def server(ratio: float) -> dict[str, tuple[Run, ...]]:
    step_s = server_s("resnet18", 8, BITS_PER_S) / ratio
    return {
        f"{name}@{ratio:g}": (timed(strategy, settings, "paper-osp", 8, step_s),)
        for name, (strategy, settings) in SERVED.items()
    }


def more(outcomes: Outcomes, ratio: float, other: str) -> str:
    return f"{100 * (step_ratio(outcomes, f'osp@{ratio:g}', f'{other}@{ratio:g}') - 1):+.0f}%"


def on_ring(outcomes: Outcomes) -> str:
    return "over BSP: " + "; ".join(f"K/C {ratio:g}: {more(outcomes, ratio, 'bsp')}" for ratio in ON_RING)


def at_server(outcomes: Outcomes) -> str:
    return "over BSP / SSP(3) / ASP: " + "; ".join(
        f"K/C {ratio:g}: {' / '.join(more(outcomes, ratio, other) for other in ('bsp', 'ssp', 'asp'))}"
        for ratio in AT_SERVER
    )


def trained(model: str, seeds: int) -> dict[str, tuple[Run, ...]]:
    shared = {
        "cluster": "lan-1g",
        "workers": 9,
        "looks": 8,
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
    runs = trained(model, seeds)
    bsp = runs["bsp"][0]
    settings = f"9 workers, {bsp.steps} steps of 32 samples, rate {bsp.lr:g}; up to 0.8 of the bytes late"
    short = "models and length of the runs are ours; the rule for what is late is our reconstruction"
    return [
        Claim(
            claim=f"{name}: no accuracy lost",
            mark="abstract",
            figure="without accuracy loss",
            source=MORE,
            runs={who: runs[who] for who in ("bsp", "osp")},
            ours=lambda outcomes: against(outcomes, "osp"),
            settings=settings,
            why=short,
        ),
        Claim(
            claim=f"{name}: LGP avoids what stale parameters would lose",
            mark="abstract",
            figure="",
            source=LGP,
            runs=runs,
            ours=lambda outcomes: (
                f"without LGP {against(outcomes, 'none')}; with it {against(outcomes, 'osp')}"
            ),
            settings=settings,
            why=short,
        ),
    ]


LIMIT = "max(C, K) is the least that a step can take that sends BSP's bytes"
PAPER = Paper(
    name="osp",
    title="OSP",
    claims=[
        Claim(
            claim="more throughput, workers in a ring",
            mark="abstract",
            figure="up to 50%",
            source=MORE,
            runs={name: runs for ratio in ON_RING for name, runs in ring(ratio).items()},
            ours=on_ring,
            settings="ResNet-18, 9 workers, lan-1g; 45 steps timed, the last 15 count",
            why=f"our BSP hides what it sends behind backward: at K = C there is 33% to win, as {LIMIT}",
        ),
        Claim(
            claim="more throughput, a server with one NIC",
            mark="abstract",
            figure="up to 50%",
            source=MORE,
            runs={name: runs for ratio in AT_SERVER for name, runs in server(ratio).items()},
            ours=at_server,
            settings="ResNet-18, 8 workers and a server, paper-osp; 45 steps timed, the last 15 count",
            why="BSP through a server pushes, waits and pulls, with nothing hidden; SSP and ASP pull behind"
            " computing, and pay for it in staleness",
        ),
        *accuracy("lenet5", "LeNet-5/MNIST", 3),
        *accuracy("resnet18", "ResNet-18/CIFAR-10", 2),
    ],
)
