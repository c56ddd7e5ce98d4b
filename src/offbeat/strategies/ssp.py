"""SSP: stale-synchronous parallel (Ho et al., 2013).

A worker that has pushed c times continues only if c − (the slowest worker's clock) ≤ `staleness`. Weights
read at clock c therefore contain every update stamped up to c − staleness, all of the reader's own, and
perhaps newer ones.

With staleness 0, SSP is BSP through the server: with `push="update"` under plain SGD and momentum, whose
steps are linear in the gradients, but not under Adam (see push_pull.py). With `push="gradient"` it is under
every optimizer: the server then gathers the gradients of all workers, and steps once, with their mean [ours].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from offbeat.core.fields import Whole
from offbeat.core.port import Port
from offbeat.server.aggregation import Barrier
from offbeat.server.half import ServerHalf
from offbeat.server.rule import ClockRule, Clocks, LockStep
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

    def rule(self) -> ClockRule:
        return LockStep() if self._steps_once else BoundedStaleness(self.staleness)

    def server_half(self) -> ServerHalf:
        half = super().server_half()
        return replace(half, aggregation=Barrier) if self._steps_once else half

    def fraction(self, port: Port) -> float:
        return 1.0 if self._steps_once else super().fraction(port)

    @property
    def _steps_once(self) -> bool:
        """True if the server steps once for all workers' gradients."""
        return self._pushes_gradients and self.staleness == 0
