"""The model by which Auto chooses: seconds per step of BSP and of LocalSGD, in closed form. [ours]

    C    seconds of computing per step, of the slowest worker
    w    seconds that this worker waits per step, which are the fewest: T = C + w is a step
    K    seconds of a whole exchange of the model, if nothing hides it
    H    seconds of it that BSP hides behind backward
    S    seconds per step for which workers wait since each is slow at times, under BSP
    d    deaths per step, of N workers

    BSP              C + w₀
    LocalSGD(p)     (C + K/p + S/√p) · (1 + d (p − 1) / 2N)

The sum of p step times varies by √p, so that its part in a step is S/√p. A worker that dies between two
averages loses its (p − 1)/2 local steps, on average. C, w and K are measured, and the rest follows:

    under BSP           w₀ = w,                             S = max(0, w − K),    H = max(0, K − w)
    under LocalSGD(p)   w₀ = min(w₀, max(0, K − H) + S),    S = max(0, w − K/p) √p

with w₀ and H of BSP's last window on the right. So the one that runs is expected to take what it took; and
BSP to wait no longer than it did, so that LocalSGD, if it is slower than the model says, is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BSP_PERIOD = 0  # stands for BSP, where LocalSGD has its period


class WindowSeconds(NamedTuple):
    """Seconds per step over a window, agreed on by all workers."""

    compute_s: float  # C
    fastest_s: float  # seconds of computing of the fastest worker
    wait_s: float  # w
    exchange_s: float  # K
    fit: bool = True  # every worker may leave BSP

    @property
    def known(self) -> bool:
        """True if every worker has measured something."""
        return 0 < self.compute_s < math.inf

    @property
    def step_s(self) -> float:
        """T, the seconds of a step."""
        return self.compute_s + self.wait_s


class Forecast(NamedTuple):
    """The model with its numbers."""

    compute_s: float  # C
    exchange_s: float  # K
    bsp_wait_s: float  # w of BSP
    straggling_s: float  # S
    deaths: float = 0.0  # d / N: deaths per step and worker

    @classmethod
    def of(cls, period: int, now: WindowSeconds, bsp: WindowSeconds, deaths: float = 0.0) -> Forecast:
        """Fit the model to what is measured under `period` now, and was under BSP, when it last ran."""
        if period == BSP_PERIOD:
            return cls(
                now.compute_s, now.exchange_s, now.wait_s, max(0.0, now.wait_s - now.exchange_s), deaths
            )
        hidden_s = max(0.0, bsp.exchange_s - bsp.wait_s)
        straggling_s = max(0.0, now.wait_s - now.exchange_s / period) * math.sqrt(period)
        wait_s = min(bsp.wait_s, max(0.0, now.exchange_s - hidden_s) + straggling_s)
        return cls(now.compute_s, now.exchange_s, wait_s, straggling_s, deaths)

    def step_s(self, period: int) -> float:
        """Return the seconds per step that are expected under `period`."""
        if period == BSP_PERIOD:
            return self.compute_s + self.bsp_wait_s
        waits_s = self.exchange_s / period + self.straggling_s / math.sqrt(period)
        return (self.compute_s + waits_s) * (1 + self.deaths * (period - 1) / 2)


def periods_up_to(longest: int) -> list[int]:
    """Return the candidates: BSP, and the periods 2, 4, 8, … up to `longest`."""
    return [BSP_PERIOD, *(1 << power for power in range(1, longest.bit_length()))]


def wanted_period(period: int, forecast: Forecast, periods: Sequence[int], gain: float) -> int:
    """Return which of `periods`, in order, is to follow `period`: often the same.

    It is the shortest that takes the fraction gain/2 longer than the fastest at most. From BSP, and to a
    longer period, it must save the fraction `gain`.
    """
    seconds = {each: forecast.step_s(each) for each in periods}
    best_s = min(seconds.values())
    best = next(each for each, took_s in seconds.items() if took_s <= (1 + gain / 2) * best_s)
    return best if best <= period or seconds[best] <= (1 - gain) * seconds[period] else period
