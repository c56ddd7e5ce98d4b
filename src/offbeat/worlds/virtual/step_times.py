"""Distributions of the seconds of a training step.

Each distribution is a quantile function: one uniform random number determines the seconds of a step.
"""

import math
import reprlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist, median
from typing import Annotated, Any

from offbeat.core.fields import Field, FieldError, Key, ListOf, Number
from offbeat.core.settings import Settings, nearest
from offbeat.worlds.virtual.random_numbers import uniform

_SECONDS = Number(noun="a number of seconds", above=0)
_FRACTION = Number(noun="a fraction", at_least=0, at_most=1)
Positive = Annotated[float, Number(above=0)]
Fraction = Annotated[float, _FRACTION]
Chance = Annotated[float, Number(noun="a probability", above=0, at_most=1)]
PositiveSeconds = Annotated[float, _SECONDS]
SecondsList = Annotated[tuple[float, ...], ListOf(item=_SECONDS, noun="a list of seconds above 0, not empty")]
Fractions = Annotated[
    tuple[float, ...], ListOf(item=_FRACTION, noun="a list of fractions from 0 to 1, not empty")
]

_NORMAL = NormalDist()
_START = -1  # in the place of a step: the number that says where a worker starts
_MACHINE = 1 << 40  # in the place of a seed: the number that says which machine a worker has


@dataclass(frozen=True, kw_only=True)
class Distribution(Settings):
    """Base of distributions of step times."""

    def seconds(self, step: int, u: float) -> float:
        """Return the seconds of a step, by one number of (0, 1)."""
        raise NotImplementedError

    def of_worker(self, step: int, seed: int, worker: int, member: int) -> float:
        """Return the seconds of a worker's step; `member` is the worker's number within its group."""
        return self.seconds(step, uniform(seed, worker, step))


@dataclass(frozen=True, kw_only=True)
class Lognormal(Distribution):
    """`{ lognormal = 0.05, sigma = 0.2 }`: the median in seconds, and the deviation of the logarithm."""

    median_s: Annotated[PositiveSeconds, Key("lognormal")]
    sigma: Positive

    def seconds(self, step: int, u: float) -> float:
        return self.median_s * math.exp(self.sigma * _NORMAL.inv_cdf(u))


@dataclass(frozen=True, kw_only=True)
class Normal(Distribution):
    """`{ normal = 0.05, deviation_s = 0.01 }`: bell-shaped, cut off at zero."""

    mean_s: Annotated[PositiveSeconds, Key("normal")]
    deviation_s: PositiveSeconds

    def seconds(self, step: int, u: float) -> float:
        # u counts from the slow end; scaled to the probability of a time above 0, it never yields less than 0
        above_zero = _NORMAL.cdf(self.mean_s / self.deviation_s)
        return max(0.0, self.mean_s - self.deviation_s * _NORMAL.inv_cdf(u * above_zero))


@dataclass(frozen=True, kw_only=True)
class Exponential(Distribution):
    """`{ exponential = 0.05, tail_s = 0.01 }`: a minimum, plus an exponential tail of the given mean."""

    least_s: Annotated[PositiveSeconds, Key("exponential")]
    tail_s: PositiveSeconds

    def seconds(self, step: int, u: float) -> float:
        return self.least_s - self.tail_s * math.log(u)


@dataclass(frozen=True, kw_only=True)
class Stragglers(Distribution):
    """`{ stragglers = 0.05, probability = 0.02, factor = 8 }`: some steps take factor times as long."""

    usual_s: Annotated[PositiveSeconds, Key("stragglers")]
    probability: Fraction
    factor: Positive

    def seconds(self, step: int, u: float) -> float:
        return self.usual_s * self.factor if u < self.probability else self.usual_s


@dataclass(frozen=True, kw_only=True)
class Trace(Distribution):
    """`{ trace = [0.05, 0.06] }`: these seconds in this order, repeated.

    The first worker of a group starts at the beginning. Each other one starts somewhere else in the list, by
    seed and rank: workers that are slow at the same steps would be no stragglers.
    """

    trace_s: Annotated[SecondsList, Key("trace")]

    def seconds(self, step: int, u: float) -> float:
        return self.trace_s[step % len(self.trace_s)]

    def of_worker(self, step: int, seed: int, worker: int, member: int) -> float:
        start = int(uniform(seed, worker, _START) * len(self.trace_s)) if member else 0
        return self.seconds(step + start, 0.5)


@dataclass(frozen=True, kw_only=True)
class Markov(Distribution):
    """`{ markov = 0.05, factor = 4, slows = 0.01, recovers = 0.1 }`: slow for some steps in a row.

    A chain of two states: before each step a usual worker becomes slow with probability `slows`, and a slow
    one usual with probability `recovers`. So a fraction slows/(slows + recovers) of all steps is slow, in
    spells of 1/recovers steps on average. Where both add up to 1, steps are independent, as of `stragglers`.
    """

    usual_s: Annotated[PositiveSeconds, Key("markov")]
    factor: Positive
    slows: Chance
    recovers: Chance

    def seconds(self, step: int, u: float) -> float:
        return self.usual_s * self.factor if u < self.slow_share else self.usual_s

    @property
    def slow_share(self) -> float:
        """The fraction of steps that are slow."""
        return self.slows / (self.slows + self.recovers)

    def of_worker(self, step: int, seed: int, worker: int, member: int) -> float:
        slow = _spells(seed, worker, self.slows, self.recovers).is_slow(step)
        return self.usual_s * self.factor if slow else self.usual_s


class _Spells:
    """The spells of one worker's chain, from step 0: usual and slow in turn, as far as asked for."""

    def __init__(self, seed: int, worker: int, slows: float, recovers: float) -> None:
        self._draw = partial(uniform, seed, worker)
        self._leaves = (slows, recovers)  # by state
        self._begins_slow = self._draw(_START) < slows / (slows + recovers)  # as at any later step
        self._ends: list[int] = []

    def is_slow(self, step: int) -> bool:
        while not self._ends or self._ends[-1] <= step:
            number = len(self._ends)
            leaves = self._leaves[self._begins_slow ^ (number % 2 == 1)]
            # the number of steps until one of probability `leaves` happens, from one uniform number
            length = 1 if leaves == 1 else math.ceil(math.log(self._draw(number)) / math.log1p(-leaves))
            self._ends.append((self._ends[-1] if self._ends else 0) + max(1, length))
        return self._begins_slow ^ (bisect_right(self._ends, step) % 2 == 1)


_spells = lru_cache(maxsize=20_000)(_Spells)


@dataclass(frozen=True, kw_only=True)
class Kinds(Distribution):
    """`{ kinds = [20, 30, 45], sigma = 0.1 }`: machines of several kinds, each with steps that vary a little.

    Of which kind a worker's machine is depends on its rank alone: no seed changes it.
    """

    kinds_s: Annotated[SecondsList, Key("kinds")]  # the median of each; one that is listed twice, is so often
    sigma: Positive  # the deviation of the logarithm

    def seconds(self, step: int, u: float) -> float:
        return self._varied(median(self.kinds_s), u)

    def of_worker(self, step: int, seed: int, worker: int, member: int) -> float:
        kind_s = self.kinds_s[int(uniform(_MACHINE, worker, _START) * len(self.kinds_s))]
        return self._varied(kind_s, uniform(seed, worker, step))

    def _varied(self, median_s: float, u: float) -> float:
        return median_s * math.exp(self.sigma * _NORMAL.inv_cdf(u))


@dataclass(frozen=True, kw_only=True)
class Measured(Distribution):
    """`{ measured = [0.051, 0.049], ready = [0.5, 1.0] }`: measured seconds, drawn with replacement.

    `ready` lists the fractions of a step at which blocks of gradients become complete, in that order.
    """

    measured_s: Annotated[SecondsList, Key("measured")]
    ready: Fractions = ()

    def check(self) -> None:
        if list(self.ready) != sorted(self.ready):
            raise FieldError(("ready",), "expected fractions in ascending order")

    def seconds(self, step: int, u: float) -> float:
        return self.measured_s[int(u * len(self.measured_s))]


Varying = Lognormal | Normal | Exponential | Stragglers | Markov | Trace | Kinds | Measured
_DISTRIBUTIONS: dict[str, type[Varying]] = {
    "lognormal": Lognormal,
    "normal": Normal,
    "exponential": Exponential,
    "stragglers": Stragglers,
    "markov": Markov,
    "trace": Trace,
    "kinds": Kinds,
    "measured": Measured,
}


@dataclass(frozen=True)
class StepTimeField(Field):
    """Seconds of a step: a number, or a table that says how they vary."""

    @property
    def expected(self) -> str:
        return f"a number of seconds above 0 or a table with one of {', '.join(_DISTRIBUTIONS)}"

    def read(self, value: Any) -> float | Varying:
        if isinstance(value, Varying):
            return value
        if not isinstance(value, dict):
            try:
                return _SECONDS.read(value)
            except FieldError:
                raise self.refuse(value) from None
        for key, distribution in _DISTRIBUTIONS.items():
            if key in value:
                return distribution.from_table(value)
        guess = nearest(next(iter(value)), _DISTRIBUTIONS) if value else ""
        raise FieldError((), f"expected {self.expected}, not {reprlib.repr(value)}{guess}")


StepTime = Annotated[float | Varying, StepTimeField("seconds of a worker's step")]


def usual_seconds(step_s: float | Varying) -> float:
    """Return the median of a worker's step times."""
    if isinstance(step_s, float):
        return step_s
    if isinstance(step_s, Trace):
        return median(step_s.trace_s)
    return step_s.seconds(0, 0.5)
