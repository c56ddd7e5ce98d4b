"""TighteningSSP: stale-synchronous parallel whose bound shrinks while training goes on.

A worker that has pushed c times continues only if c − slowest ≤ max(0, `first` − slowest/`every`), where
slowest is the slowest worker's clock: it starts like SSP with staleness `first`, and ends like BSP through
the server. This is an example of Offbeat's own, from no paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from offbeat.core.fields import Whole
from offbeat.server.rule import ClockRule, Clocks
from offbeat.strategies.push_pull import PushPull


@dataclass(frozen=True)
class TighteningBound(ClockRule):
    """Rule whose bound falls by 1 after every `every` clocks of the slowest worker, down to 0."""

    first: int
    every: int

    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return clock - state.slowest <= max(0, self.first - state.slowest // self.every)


@dataclass(frozen=True, kw_only=True)
class TighteningSSP(PushPull):
    """Strategy that pushes and pulls at every step, ahead of the slowest worker by ever fewer steps."""

    name = "tightening_ssp"
    summary = "push and pull through a server, ahead of the slowest worker by ever fewer steps"

    first: Annotated[int, Whole("bound at the first step", of="steps", at_least=0)] = 8
    every: Annotated[int, Whole("steps until the bound falls by 1", of="steps", at_least=1)] = 50

    @property
    def slack(self) -> int:
        return 0  # in the end, no worker may be ahead

    def rule(self) -> TighteningBound:
        return TighteningBound(self.first, self.every)
