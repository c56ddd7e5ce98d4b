"""The roster of an epoch, as a text of the registry.

In virtual time all workers are in one process, and each of them reads the same texts. So the latest rosters
are kept: a thousand workers read, index and write a roster once, not each of them anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

from offbeat.errors import OffbeatError

KEPT = 8  # rosters


@dataclass(frozen=True)
class Roster:
    """The workers of an epoch, in the order of their ranks."""

    epoch: int
    members: tuple[str, ...]  # have the state
    joining: tuple[str, ...] = ()  # get the state in this epoch
    stopped: str = ""  # why nobody goes on

    @cached_property
    def everyone(self) -> tuple[str, ...]:
        return self.members + self.joining

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each worker, by name."""
        return {name: rank for rank, name in enumerate(self.everyone)}

    @cached_property
    def _followed_by(self) -> dict[tuple[str, ...], str]:
        """The texts of rosters that follow this one, by those who join."""
        return {}

    def text_with(self, names: tuple[str, ...]) -> str:
        """Write the roster that follows this one, when these workers join."""
        if names not in self._followed_by:
            self._followed_by[names] = Roster(self.epoch + 1, self.everyone, names).to_text()
        return self._followed_by[names]

    def to_text(self) -> str:
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)})

    @classmethod
    @lru_cache(maxsize=KEPT)
    def from_text(cls, text: str) -> Roster:
        """Read what `to_text` wrote; raise an error for any other text."""
        read = read_json(text)
        match read:
            case {
                "epoch": int(epoch),
                "members": list(members),
                "joining": list(joining),
                "stopped": str(why),
            }:
                names = [*members, *joining]
                if len(read) == 4 and epoch >= 0 and all(isinstance(name, str) for name in names):
                    return cls(epoch, tuple(members), tuple(joining), why)
        raise foreign_text("a roster", text)


# --- texts of the registry: a stranger may reach the store in which they are


def read_json(text: str) -> Any:
    """Read a text of a registry; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def foreign_text(what: str, text: str) -> OffbeatError:
    """Return the error for a text in the store that no worker has written."""
    return OffbeatError(
        f"{text[:40]!r} in the rendezvous store is not {what}: somebody else has written to the store, "
        "or a worker with a token, or of another version. Let only the workers' hosts reach the store "
        "(docs/security.md)"
    )
