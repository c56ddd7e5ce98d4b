"""SignedStore: values in a store that only holders of the run's token can write.

Anybody who reaches a store can read and write it. A value is therefore published with a signature of its key
and its text; a value that was forged, or moved from another key or another run, is refused.
"""

from __future__ import annotations

from offbeat.worlds.processes.server.auth import sign, verify
from offbeat.worlds.processes.store import DeadlineStore


class SignedStore:
    """A store, as holders of one run's token use it."""

    def __init__(self, store: DeadlineStore, token: bytes) -> None:
        self._store = store
        self._token = token

    def set(self, key: str, value: str) -> None:
        self._store.set(key, sign(self._token, key, value))

    def get(self, key: str) -> str:
        """Return a value, once it has been set; raise an error if its signature is wrong."""
        return verify(self._token, key, self._store.get(key))

    def find(self, key: str) -> str | None:
        """Return a value without waiting; None: not there yet."""
        return self.get(key) if self._store.check([key]) else None

    def propose(self, key: str, value: str) -> str:
        """Set a value unless there is one already; return the value that is there now."""
        return self._compare_set(key, "", value)

    def replace(self, key: str, expected: str, value: str) -> str:
        """Replace an expected value by another; return the value that is there now."""
        return self._compare_set(key, sign(self._token, key, expected), value)

    def _compare_set(self, key: str, expected: str, value: str) -> str:
        found = self._store.compare_set(key, expected, sign(self._token, key, value))
        return verify(self._token, key, found)
