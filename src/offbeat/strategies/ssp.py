"""SSP: stale-synchronous parallel (Ho et al., 2013).

A worker that has pushed c times continues only if c − (the slowest worker's clock) ≤ `staleness`. Weights
read at clock c therefore contain every update stamped up to c − staleness, all of the reader's own, and
perhaps newer ones. With staleness 0, SSP is BSP through the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from offbeat.core.fields import Whole
from offbeat.server.rule import ClockRule, Clocks
from offbeat.strategies.push_pull import PushPull


@dataclass(frozen=True)
class BoundedStaleness(ClockRule):
    """Rule that admits a worker at most `staleness` clocks ahead of the slowest."""

    staleness: int

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return clock - state.slowest <= self.staleness

    def gate(self, state: Clocks) -> int:
        return state.slowest


@dataclass(frozen=True, kw_only=True)
class SSP(PushPull):
    """Strategy that pushes and pulls at every step, at most `staleness` steps ahead of the slowest worker."""

    name = "ssp"
    summary = "push and pull through a server, at most `staleness` steps ahead of the slowest"

    staleness: Annotated[
        int, Whole("steps that a worker may be ahead of the slowest", of="steps", at_least=0)
    ] = 3

    @property
    def slack(self) -> int:
        return self.staleness

    def rule(self) -> BoundedStaleness:
        return BoundedStaleness(self.staleness)
