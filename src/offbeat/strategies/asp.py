"""ASP: asynchronous parallel. Every push is applied at once; its worker pulls and continues.

No worker waits for another. Staleness is unbounded: a slow worker's updates were computed from old weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.server.rule import Unbounded
from offbeat.strategies.push_pull import PushPull


@dataclass(frozen=True, kw_only=True)
class ASP(PushPull):
    """Strategy that pushes and pulls at every step, without waiting for other workers."""

    name = "asp"
    summary = "push updates to a server and pull, never waiting for other workers"

    @property
    def slack(self) -> float:
        return math.inf

    def rule(self) -> Unbounded:
        return Unbounded()
