"""ASP: asynchronous parallel. Every push is applied at once; the pusher pulls and goes on.

Nobody waits for anybody. Staleness is unbounded: a slow worker's updates were computed from old weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.server.rule import ClockRule, Clocks
from offbeat.strategies.push_pull import PushPull


class Unbounded(ClockRule):
    def admits(self, state: Clocks, worker: int, clock: int) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class ASP(PushPull):
    """Push and pull at every step, waiting for nobody."""

    name = "asp"
    summary = "push updates to a server and pull, never waiting for other workers"

    @property
    def slack(self) -> float:
        return math.inf

    def rule(self) -> Unbounded:
        return Unbounded()
