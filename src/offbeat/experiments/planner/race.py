"""The race between candidates: over which seeds they are compared, and when two of them are apart.

    x_s = ln(T_s / R_s)                               T, R: seconds to the target of a candidate and of the
                                                      leader, both with seed s
    ratio = exp(x̄)      interval = exp(x̄ ± t_{n−1} s_x/√n)       n seeds, Student's t, 95%, two-sided

Seeds are paired: both have the same first weights, order of data and random step times, so what they share
cancels. The leader has the least geometric mean among the candidates with the most seeds.

    apart   the interval is above 1: the candidate is slower, and gets no more seeds
    equal   the interval is inside 1 ± 2%: no difference that matters; no more seeds
    open    neither: both run with their next seeds, up to `most` of them. What is open then is too close to
            call

With one seed there is no spread. We take a factor of 1.5 either way for the interval: two candidates that
were 1.27 apart with one seed came in the other order over three.

What the interval does not cover: it takes logarithms for normal; it holds for each candidate by itself, so of
twenty one may well err; and the leader is chosen by the same figures, which flatters it a little. That real
machines differ from the model is no matter of seeds (`CLOSE` in ranking.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

ONE_SEED = 1.5  # factor either way that one seed leaves open
SAME = 0.02  # fraction of the seconds that makes no difference
MOST_SEEDS = 30

T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452),
)
"""The 97.5% quantiles of Student's t for 1 to 29 degrees of freedom."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of a candidate divided by those of the leader, over the seeds that both have."""

    ratio: float
    low: float
    high: float
    seeds: int

    @property
    def apart(self) -> bool:
        """True if the candidate is slower than the leader."""
        return self.low > 1

    @property
    def equal(self) -> bool:
        """True if the difference is too small to matter."""
        return self.low >= 1 - SAME and self.high <= 1 + SAME

    @property
    def open(self) -> bool:
        """True if more seeds could tell who is faster."""
        return not self.apart and not self.equal

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"


def compare(candidate: Sequence[float], leader: Sequence[float]) -> Comparison:
    """Compare seconds to the target, of the same seeds in the same order; one may have more seeds."""
    logs = [math.log(own / other) for own, other in zip(candidate, leader, strict=False)]
    mean, seeds = fmean(logs), len(logs)
    spread = math.log(ONE_SEED) if seeds == 1 else T_975[seeds - 2] * stdev(logs) / math.sqrt(seeds)
    return Comparison(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread), seeds)


def find_leader(seconds: Sequence[Sequence[float]]) -> int | None:
    """Return the index of the leader; candidates without seconds are not in the race."""
    most = max(map(len, seconds), default=0)
    if not most:
        return None
    means = {i: fmean(map(math.log, own)) for i, own in enumerate(seconds) if len(own) == most}
    return min(means, key=means.__getitem__)
