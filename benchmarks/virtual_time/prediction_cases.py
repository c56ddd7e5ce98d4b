"""The cases of the benchmark prediction, declared before they are run.

A case is a strategy with its settings, a model with a pace, the rate of the links, and equal workers or a
straggler. No constant of calibration or virtual time was fitted to them: for that the MLP ran at a pace of 60
ms, and the CNN. But causes of misses were found on those at 1 Gbit/s, and mended (docs/log.md). Settings are
the defaults, except where a run of some twenty steps would not show them: periods of 8 steps, and SelSync
decides from step 8 on instead of 25.

Left out are `auto`, whose steps are those of BSP or of LocalSGD, which are cases, with a change after at
least two windows that a short run's mean would mix; and DiLoCo, OSP and SSD-SGD with `on="server"`. What
these send is charged by the same shards and links as the served strategies here, but whether their own rules
are predicted as well has not been measured.

Cases with the same model, rate and workers are a group: they share a calibration, and a file of results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from offbeat.cli.parse import strategies_of
from offbeat.core.units import parse_rate
from offbeat.experiments.planner.candidates import codecs_of

HOSTS = 4
RATES = ("1gbit", "200mbit", "50mbit")
# At 200 Mbit/s workers of a server may stay in phase for 40 steps, by chance (docs/log.md).
STEPS = {
    ("mlp", "1gbit"): 64,
    ("mlp", "200mbit"): 80,
    ("mlp", "50mbit"): 24,
    ("lenet5", "50mbit"): 80,
}
STRAGGLERS: dict[str, tuple[str, ...]] = {"equal": (), "one 2x slower": ("--slow", "3=2.0")}
START_S = 10.0  # an estimate for a machine with a core for each worker: imports, connections, an evaluation
CALIBRATION_S = 25.0


@dataclass(frozen=True)
class Model:
    """A model of Fashion-MNIST, the least seconds of its steps, its bytes, and the rates of its cases."""

    name: str
    pace_s: float
    nbytes: int
    rates: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}, paced {1e3 * self.pace_s:g} ms"


MODELS = (
    Model("mlp", 0.08, 2_678_824, RATES),
    Model("lenet5", 0.04, 246_824, ("50mbit",)),  # a tenth of the bytes: at higher rates they hardly count
)


@dataclass(frozen=True)
class Method:
    """A strategy with its settings, and an estimate of what it sends: fractions of BSP's bytes."""

    name: str
    settings: tuple[str, ...] = ()
    sends: float = 1.0

    def __str__(self) -> str:
        return " ".join([self.name, *self.settings])

    @property
    def options(self) -> list[str]:
        """The options of `offbeat train` and `offbeat simulate`."""
        return ["--strategy", self.name, *(part for text in self.settings for part in ("--set", text))]

    @cached_property
    def codecs(self) -> list[str]:
        """The codecs to calibrate, as a cluster file names them."""
        return list(map(str, codecs_of(strategies_of(f"{self.name}({','.join(self.settings)})", []))))


METHODS = (
    Method("bsp"),
    Method("local_sgd", ("period=8",), 0.125),
    Method("diloco", ("period=8",), 0.125),
    Method("sparse_loco", ("period=8",), 0.01),
    Method("selsync", ("window=8",), 0.5),
    Method("osp"),
    Method("ssd_sgd", ("warmup=8",)),
    Method("asp"),
    Method("ssp"),
    Method("dssp"),
    Method("gssp"),
    Method("gssp", ("sparse=gdtopk",)),
    Method("oscars", (), 0.5),
    Method("bsp", ("codec=error_feedback(topk(0.01))",), 0.1),
    Method("bsp", ("codec=quantize(8)",), 0.3),
    Method("bsp", ("codec=error_feedback(powersgd(4))",), 0.1),
    Method("diloco", ("period=8", "codec=error_feedback(quantize(4))"), 0.02),
    Method("ssp", ("codec=half",), 0.75),
)


@dataclass(frozen=True)
class Group:
    """A model, a rate, equal workers or a straggler; and the methods that are run there."""

    model: Model
    rate: str
    workers: str
    methods: tuple[Method, ...] = METHODS

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.rate}, {self.workers}"

    @property
    def steps(self) -> int:
        """The steps of each worker."""
        return STEPS[self.model.name, self.rate]

    @property
    def codecs(self) -> list[str]:
        """The codecs to calibrate."""
        return list(dict.fromkeys(codec for method in self.methods for codec in method.codecs))

    def estimate_s(self, method: Method) -> float:
        """Estimate the real seconds of a case, on a machine with a core for each worker."""
        exchange_s = 2 * (HOSTS - 1) / HOSTS * self.model.nbytes * 8 / parse_rate(self.rate)
        pace_s = self.model.pace_s * (2 if STRAGGLERS[self.workers] else 1)
        return START_S + self.steps * (pace_s + method.sends * exchange_s)

    @property
    def seconds(self) -> float:
        """Estimate the real seconds of all cases and the calibration."""
        return CALIBRATION_S + sum(map(self.estimate_s, self.methods))


GROUPS = tuple(
    Group(model, rate, workers)
    for model in MODELS
    for rate, workers in itertools.product(model.rates, STRAGGLERS)
)


def select(
    rates: Iterable[str], models: Iterable[str], workers: Iterable[str], strategies: Iterable[str]
) -> list[Group]:
    """Return the groups with these rates, models and workers, with the methods of these strategies."""
    wanted = (set(rates), set(models), set(workers), set(strategies))
    return [
        Group(group.model, group.rate, group.workers, methods)
        for group in GROUPS
        if (methods := tuple(method for method in group.methods if method.name in wanted[3]))
        and group.rate in wanted[0]
        and group.model.name in wanted[1]
        and group.workers in wanted[2]
    ]
