"""Pending results: operations that start now and are awaited later.

A coroutine of a strategy awaits only `Pending` objects. In the world of processes `block_on` waits for them;
in virtual time the scheduler does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from torch import Tensor

from offbeat.errors import OffbeatError

T = TypeVar("T")


class Pending(Generic[T]):  # not an ABC: every resume tests whether something is a Pending
    """Result of an operation in progress. Await it for the value, later to overlap it with other work."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Return whether `result` would return at once."""

    @abstractmethod
    def result(self) -> T:
        """Return the value, or raise the operation's error. Call it only once `done`."""

    @abstractmethod
    def wait(self) -> None:
        """Block until `done`, in a world where a worker can block."""

    def fill_once(self, into: Tensor, fill: Callable[[], None]) -> None:
        """Call `fill`, which writes into `into` what all workers compute from this operation's result.

        It must be the same tensor on all of them: where one process simulates many, it is computed once.
        """
        fill()

    def __await__(self) -> Generator[Pending[Any], None, T]:
        if not self.done():
            yield self
        return self.result()


class Arrived(Pending[T]):
    """Result that is available already."""

    def __init__(self, value: T) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self._value

    def wait(self) -> None:
        return


def expect_pending(awaited: object) -> Pending[Any]:
    """Return the awaited `Pending`; refuse any other object, since no world could resume the strategy."""
    if not isinstance(awaited, Pending):
        raise OffbeatError(
            f"a strategy may await only a Pending that a port or a replica returned, not a "
            f"{type(awaited).__name__}: nothing else can be awaited in both worlds"
        )
    return awaited


def block_on(coroutine: Coroutine[Pending[Any], None, T]) -> T:
    """Run a coroutine to its end, blocking wherever it awaits."""
    try:
        while True:
            expect_pending(coroutine.send(None)).wait()
    except StopIteration as finished:
        value: T = finished.value
        return value
    finally:
        coroutine.close()
