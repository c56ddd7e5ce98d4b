"""SignedStore: values in a store that only holders of the run's token can write.

Anybody who reaches a store can read and write it. A value is therefore published with a signature of its key
and its text; a value that was forged, or moved from another key or another run, is refused.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from offbeat.worlds.processes.server.auth import sign, verify


class SignedStore:
    """A store, as holders of one run's token use it."""

    def __init__(self, store: dist.Store, token: bytes) -> None:
        self._store = store
        self._token = token

    def set(self, key: str, value: str) -> None:
        self._store.set(key, sign(self._token, key, value))

    def get(self, key: str, timeout_s: float | None = None) -> str:
        """Return a value, and wait until it is there; raise an error if its signature is wrong."""
        if timeout_s is not None:
            self._store.wait([key], timedelta(seconds=timeout_s))
        return verify(self._token, key, self._store.get(key))

    def find(self, key: str) -> str | None:
        """Return a value without waiting; None: not there yet."""
        return self.get(key) if self._store.check([key]) else None

    def propose(self, key: str, value: str) -> str:
        """Set a value unless there is one already; return the value that is there now."""
        signed = sign(self._token, key, value)
        return verify(self._token, key, self._store.compare_set(key, "", signed))
