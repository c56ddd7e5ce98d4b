"""Steps of workers under a server's rule, without a server."""

from __future__ import annotations

from typing import Any

from offbeat.server.messages import Push


def pushed(rule: Any, state: Any, worker: int, clock: int, at_s: float = 0.0) -> bool:
    """Count a worker's push; return whether the worker may go on at once."""
    rule.advance(state, Push(worker=worker, clock=clock, update=[], at_s=at_s))
    return bool(rule.admits(state, worker, clock))


def of_clocks(rule: Any, *clocks: int) -> Any:
    """Return the rule's state after workers 0, 1 and so on have joined with these clocks."""
    state = rule.init()
    for worker, clock in enumerate(clocks):
        assert rule.join(state, worker, clock) == clock
    assert rule.members(state) == list(range(len(clocks)))
    return state
