"""Registry of a membership in virtual time: shared texts and counters, whose calls take no time.

A worker that pauses wakes up when something that it has read since its last pause is written, when somebody
whom it has asked the detector about is found to be lost, or when an exchange of its own ends. So nothing is
polled, and waits end to the second.
"""

from __future__ import annotations

from collections import defaultdict

from offbeat.core.pending import Pending
from offbeat.worlds.virtual.elastic.life import Life


class SharedRegistry:
    """The texts and counters of all workers, and who waits for a change of which."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._readers: defaultdict[str, dict[Life, None]] = defaultdict(dict)  # in order

    def read(self, key: str, reader: Life) -> None:
        """Let a worker know of the next change of a key."""
        self._readers[key][reader] = None

    def changed(self, key: str) -> None:
        """Wake up those who have read a key."""
        for life in self._readers.pop(key, ()):
            life.alarm.ring()


class VirtualRegistry:
    """One worker's view of the registry."""

    def __init__(self, shared: SharedRegistry, life: Life) -> None:
        self._shared = shared
        self._life = life

    def get(self, key: str) -> Pending[str | None]:
        def get() -> str | None:
            self._shared.read(key, self._life)
            return self._shared.texts.get(key)

        return self._life.when_connected(get)

    def set(self, key: str, value: str) -> Pending[None]:
        def set_text() -> None:
            self._shared.texts[key] = value
            self._shared.changed(key)

        return self._life.when_connected(set_text)

    def set_once(self, key: str, value: str) -> Pending[str]:
        def set_once() -> str:
            if key not in self._shared.texts:
                self._shared.texts[key] = value
                self._shared.changed(key)
            return self._shared.texts[key]

        return self._life.when_connected(set_once)

    def add(self, key: str, amount: int) -> Pending[int]:
        def add() -> int:
            total = self._shared.counts[key] = self._shared.counts.get(key, 0) + amount
            if amount:
                self._shared.changed(key)
            else:
                self._shared.read(key, self._life)
            return total

        return self._life.when_connected(add)

    def delete(self, key: str) -> Pending[None]:
        def delete() -> None:
            self._shared.texts.pop(key, None)

        return self._life.when_connected(delete)

    def pause(self) -> Pending[None]:
        return self._life.alarm
