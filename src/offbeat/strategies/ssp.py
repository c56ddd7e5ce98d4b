"""SSP: stale-synchronous parallel (Ho et al., 2013).

A worker that has pushed c times goes on only if c − (the slowest worker's clock) ≤ `staleness`. A read at
clock c therefore holds every update stamped up to c − staleness, all of the reader's own, and perhaps newer
ones. With staleness 0 it is BSP, through the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import SettingError
from offbeat.server.rule import ClockRule, Clocks
from offbeat.strategies.push_pull import PushPull


@dataclass(frozen=True)
class BoundedStaleness(ClockRule):
    """Admits a worker that is at most `staleness` clocks ahead of the slowest."""

    staleness: int

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return clock - state.slowest <= self.staleness


@dataclass(frozen=True, kw_only=True)
class SSP(PushPull):
    """Push and pull at every step, at most `staleness` steps ahead of the slowest worker."""

    name = "ssp"
    summary = "push and pull through a server, at most `staleness` steps ahead of the slowest"

    staleness: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.staleness, int) or self.staleness < 0:
            raise SettingError(f"staleness={self.staleness!r}: a whole number of steps, 0 or more")

    @property
    def slack(self) -> int:
        return self.staleness

    def rule(self) -> BoundedStaleness:
        return BoundedStaleness(self.staleness)
