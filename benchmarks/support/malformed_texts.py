"""Malformed texts for the parsers of what elastic workers read from their store."""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.support.malformed import Target
from offbeat.core.membership import ABORT, COMMIT, Roster, read_decision, read_number
from offbeat.errors import OffbeatError


def text_targets() -> list[Target]:
    """Return all parsers of elastic workers."""
    rosters = [
        Roster(3, ("slot1-22.1", "slot2-23.1")),
        Roster(4, ("a.1",), ("b.2",)),
        Roster(5, (), (), "why"),
    ]
    decisions = [[COMMIT, []], [COMMIT, ["slot1-22.1"]], [ABORT, []]]
    return [
        _target("roster", [roster.to_text() for roster in rosters], Roster.from_text),
        _target("decision", [json.dumps(decision) for decision in decisions], read_decision),
        _target("clock and epoch", ["1", "4711"], read_number),
    ]


def _target(name: str, true: list[str], read: Callable[[str], object]) -> Target:
    def accepts(data: bytes) -> bool:
        try:
            read(data.decode(errors="replace"))  # as the registry of a store does
        except OffbeatError:
            return False
        return True

    return Target(f"{name} of elastic workers", [text.encode() for text in true], accepts)
