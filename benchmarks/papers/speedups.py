"""At which K/C, and with which stragglers, do the papers' speed-ups come out?

    python -m benchmarks run speedups [--only OSP SelSync …]

C is the time to compute a step, K the time to exchange the model: that of a ring all-reduce, or of all pushes
to a server with one NIC. In virtual time, twelve layers of equal size and momentum SGD, with gradients that
cost nothing. Links have no latency and start at their full rate, so K/C is all that matters. 36 steps, of
which the last 24 count. With GSSP the work is shared, and C is that of the fastest group. Nothing is trained:
what a speed-up costs in accuracy is in `trained`.

A cell has the samples per second over those of BSP; after a stroke over those of a BSP that hides nothing
behind backward, as the papers' may have been. Ours sends gradients as they become ready, as DDP does. SelSync
averages in the fraction of steps that follows from the paper's LSSR, which is what its authors measured. The
last column says between which K/C the paper's figure is reached, by interpolation, over either BSP.
Finished runs are kept in `--out`, so a run that was stopped goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.papers.gpt_run import TimedTask
from benchmarks.papers.runs import Cache
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from offbeat.core.blocks import BLOCKS, SMALLEST_BLOCK_BYTES, trainable_bytes
from offbeat.core.settings import build, lookup, parse_pairs
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Worker
from offbeat.experiments.tasks import Batch
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster, ServerMachines, Workers
from offbeat.worlds.virtual.step_times import Lognormal

STEPS, FIRST = 36, 12  # of all workers on average; the step from which time counts
K_S = 1.0
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0)


class LayersTask(TimedTask):
    """Layers that are a block each, and an optimizer that has a state, which SSD-SGD sends, too."""

    def build(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers)))

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


class SteadyTask(LayersTask):
    """The same with gradients that never change; those of zeros are a change to SelSync, which divides."""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return torch.zeros(())


SIZES = {"batch_size": 1, "context": 8, "layers": BLOCKS, "width": math.isqrt(SMALLEST_BLOCK_BYTES // 4)}
TASK, STEADY = LayersTask(**SIZES), SteadyTask(**SIZES)


@dataclass(frozen=True)
class Setting:
    """A cluster but for its K/C: how workers differ, and whether a server with one NIC serves them."""

    name: str
    slowness: tuple[float, ...]  # of each worker, as a factor on C
    sigma: float = 0.0  # deviation of the logarithm of each step's seconds
    served: bool = False

    def at(self, ratio: float) -> Cluster:
        """Return the cluster with this K/C."""
        count = len(self.slowness)
        sent = count if self.served else 2 * (count - 1) / count  # times the model
        rate = 8 * sent * trainable_bytes(TASK.build()) / K_S
        step_s = [slowness * K_S / ratio for slowness in self.slowness]
        links = {"up_bits_per_s": rate, "down_bits_per_s": rate}
        return Cluster(
            workers=tuple(
                Workers(step_s=Lognormal(median_s=s, sigma=self.sigma) if self.sigma else s, **links)
                for s in step_s
            ),
            server=ServerMachines(**links) if self.served else None,
            slow_start=False,
        )


def groups(slowest: float) -> Setting:
    """Return 8 workers in four groups, whose steps take from 1 to `slowest` times as long."""
    slowness = [1 + (slowest - 1) * group / 3 for group in range(4) for _ in range(2)]
    return Setting(f"8 workers, steps of 1 to {slowest:g} C", tuple(slowness))


ALIKE = Setting("8 workers, alike", (1.0,) * 8)
VARYING = Setting("8 workers, steps vary (σ 0.3)", (1.0,) * 8, sigma=0.3)
SERVED = Setting("8 workers and a server, alike", (1.0,) * 8, served=True)
Method = tuple[str, tuple[str, ...]]
ALWAYS: Method = ("selsync", ("delta=0", "window=2"))
NEVER: Method = ("selsync", ("delta=1e9", "window=2"))  # with inf no flags would be sent
BSP: Method = ("bsp", ())
SERVED_BSP: Method = ("ssp", ("staleness=0",))


class Progress(Callback):
    """When worker 0 finished which step; of shared work the number is that of all workers' progress."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self.points.append((step, worker.seconds))

    @property
    def step_s(self) -> float:
        """Seconds per step, from step FIRST on."""
        counted = [point for point in self.points if point[0] >= FIRST]
        (first, began), (last, ended) = counted[0], counted[-1]
        return (ended - began) / (last - first)


@dataclass(frozen=True)
class Timing:
    """A timed run; its outcome depends on these fields only, so they are its cache key."""

    method: Method
    setting: Setting
    ratio: float

    @property
    def key(self) -> str:
        return json.dumps({"benchmark": "speedups", "steps": (FIRST, STEPS), **asdict(self)}, sort_keys=True)


class Kept:
    """Finished timings; `main` says in which folder they are, until then there are none."""

    cache: Cache | None = None


def step_s(method: Method, setting: Setting, ratio: float) -> float:
    """Return the seconds of a step, and keep them."""
    timing = Timing(method, setting, ratio)
    if Kept.cache is None:
        return measured(timing)
    if timing not in Kept.cache:
        Kept.cache.add(timing, {"step_s": measured(timing)})
    return float(Kept.cache[timing]["step_s"])


def measured(timing: Timing) -> float:
    """Simulate; return the seconds of a step."""
    (name, settings), setting = timing.method, timing.setting
    task = STEADY if name == "selsync" else TASK
    strategy = build(lookup("strategy", name, STRATEGIES), parse_pairs(settings))
    job = Job(task=task, strategy=strategy, workers=len(setting.slowness), steps=STEPS, evaluate_every=STEPS)
    progress = Progress()
    simulate(job, setting.at(timing.ratio), task.load(), lambda ledgers: [progress])
    return progress.step_s


def mixed(lssr: float) -> Callable[[Setting, float], float]:
    """Return the seconds of a step of SelSync of which the fraction `lssr` is local."""
    return lambda setting, ratio: (
        lssr * step_s(NEVER, setting, ratio) + (1 - lssr) * step_s(ALWAYS, setting, ratio)
    )


def plain(name: str, *settings: str) -> Callable[[Setting, float], float]:
    """Return the seconds of a step of a strategy."""
    return lambda setting, ratio: step_s((name, settings), setting, ratio)


@dataclass(frozen=True)
class Row:
    """A method on a kind of cluster, and its paper's figures."""

    paper: str
    method: str
    setting: Setting
    figures: tuple[float, ...]
    seconds: Callable[[Setting, float], float]

    @property
    def gains(self) -> list[list[float]]:
        """The speed-up at each K/C: over BSP as it is here, and over one that hides nothing.

        Through a server BSP hides nothing anyway, so there is one.
        """
        baselines = [SERVED_BSP] if self.setting.served else [BSP, ALWAYS]
        return [
            [step_s(baseline, self.setting, ratio) / self.seconds(self.setting, ratio) for ratio in RATIOS]
            for baseline in baselines
        ]

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        gains = self.gains
        where = [" / ".join(crossing(of, figure) for of in gains) for figure in self.figures]
        return (
            self.method,
            self.setting.name,
            *(" / ".join(f"{gain:.2f}" for gain in at) for at in zip(*gains, strict=True)),
            " to ".join(f"{figure:g}x" for figure in self.figures),
            "; ".join(f"{figure:g}x: {told}" for figure, told in zip(self.figures, where, strict=True)),
        )


def rows() -> list[Row]:
    """Return all rows."""
    found = []
    for paper, figure, method, settings in (
        ("OSP", 1.5, "osp", ("growth=0",)),
        ("SSD-SGD", 2.1, "ssd_sgd", ("warmup=5",)),
    ):
        for setting in (ALIKE, VARYING, SERVED):
            at = ("on=server",) if setting.served else ()
            found.append(Row(paper, paper, setting, (figure,), plain(method, *settings, *at)))
    for setting in (ALIKE, VARYING):
        for lssr, figure in ((0.829, 2.03), (0.912, 6.16), (0.725, 2.42)):
            found.append(Row("SelSync", f"SelSync, LSSR {lssr:g}", setting, (figure,), mixed(lssr)))
    for slowest in (2.0, 5.0):
        found.append(Row("GSSP", "GSSP", groups(slowest), (1.46, 2.2), plain("gssp")))
    sparse = plain("gssp", "sparse=gdtopk")
    return [*found, Row("GSSP", "GDTopK", groups(5.0), (1.46, 2.2), sparse)]


def crossing(gains: Sequence[float], figure: float) -> str:
    """Return the K/C between which a figure is reached, in words."""
    reached = [place for place, gain in enumerate(gains) if gain >= figure]
    if not reached:
        best = max(gains)
        return f"not here: at most {best:.2f}, at K/C {RATIOS[list(gains).index(best)]:g}"

    def between(place: int) -> str:
        part = (figure - gains[place]) / (gains[place + 1] - gains[place])
        return f"{RATIOS[place] + part * (RATIOS[place + 1] - RATIOS[place]):.2g}"

    first, last = reached[0], reached[-1]
    begin = between(first - 1) if first else f"{RATIOS[0]:g} or less"
    return f"K/C {begin} to {between(last)}" if last + 1 < len(gains) else f"K/C {begin} and more"


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("speedups", __doc__)
    known = list(dict.fromkeys(row.paper for row in rows()))
    parser.add_argument("--only", nargs="+", choices=known, default=known, help="papers")
    parser.add_argument("--out", type=Path, default=Path("runs/speedups"), help="folder of finished runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    Kept.cache = Cache(options.out)
    ratios = [f"K/C {ratio:g}" for ratio in RATIOS]
    columns = ["method", "cluster", *ratios, "the paper's", "comes out at"]
    table = Table("speedups", __doc__ or "", columns, "" if options.only == known else "some")
    for row in rows():
        if row.paper in options.only:
            table.row(*row.cells())
    table.write()
