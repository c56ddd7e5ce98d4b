"""Turns: tensors for the shards of one host leave one after another, in the order of their submission.

A host's shards have connections of their own. If all of them sent at once, all pushes would arrive together
in the end, and nothing could come back meanwhile (`server/pieces.py`). The order is for speed alone: messages
of a connection that breaks give up their turns, and are sent again when there is a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Turns:
    """The line of all messages with tensors from this worker to the shards of one host."""

    def __init__(self) -> None:
        self._line: list[tuple[object, object]] = []  # connections, and messages for them
        self._changed = Condition()

    def line_up(self, connection: object, message: object) -> None:
        """Add a message at the end of the line."""
        with self._changed:
            self._line.append((connection, message))

    @contextmanager
    def turn(self, connection: object, message: object) -> Iterator[None]:
        """Wait until a message is the first in line, or not in it; at the end remove it."""
        place = connection, message
        with self._changed:
            self._changed.wait_for(lambda: place not in self._line or self._line[0] == place)
        try:
            yield
        finally:
            with self._changed:
                self._line = [other for other in self._line if other != place]
                self._changed.notify_all()

    @property
    def has_more(self) -> bool:
        """True if there is a message behind the first one."""
        with self._changed:
            return len(self._line) > 1

    def give_up(self, connection: object) -> None:
        """Remove all messages of a connection that has ended."""
        with self._changed:
            self._line = [place for place in self._line if place[0] is not connection]
            self._changed.notify_all()
