"""DeadlineStore: a torch store whose calls always end, and which reconnects.

A call of torch's TCPStore blocks for as long as the other end says nothing, and a client whose connection was
reset fails for ever. Here every call runs in a thread of its own and has a deadline; a broken client is
replaced by a new one. A call that fails until its deadline raises RankLost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import torch.distributed as dist

from offbeat.errors import RankLost

T = TypeVar("T")
TIMEOUT_S = 60.0  # for a call, unless a caller has a timeout of its own
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.2  # between looks for what another process is to do
BACKOFF_S = 0.1  # between attempts to reconnect
IDLE_S = 1.0  # after which a thread without calls ends: a closed attachment leaves none behind


def wait_for(look: Callable[[], T], patience_s: float, longest_s: float = LONGEST_PAUSE_S) -> T:
    """Look again and again, less and less often, for what another process is to do; return the last look.

    Ranks that train alike come within milliseconds of each other, so the first pauses are short. However long
    a look takes, a pause is as long: others want to ask the store, too.
    """
    began, pause_s = time.monotonic(), SHORTEST_PAUSE_S
    deadline = began + patience_s
    while not (found := look()):
        now = time.monotonic()
        if now > deadline:
            break
        time.sleep(min(longest_s, max(pause_s, now - began)))
        began, pause_s = time.monotonic(), 1.5 * pause_s
    return found


class DeadlineStore:
    """A torch store with a deadline for every call."""

    def __init__(self, store: dist.Store, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._client = _Client(store)
        self._prefix = ""

    @classmethod
    def of(cls, store: dist.Store | DeadlineStore, timeout_s: float = TIMEOUT_S) -> DeadlineStore:
        """Give a store's calls this deadline, whether they have one already or not."""
        return store.within(timeout_s) if isinstance(store, DeadlineStore) else cls(store, timeout_s)

    def within(self, timeout_s: float) -> DeadlineStore:
        """Return the same store, with another deadline."""
        return self._copy(timeout_s, self._prefix)

    def prefixed(self, prefix: str) -> DeadlineStore:
        """Return the same store for keys that begin with this prefix."""
        return self._copy(self.timeout_s, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str) -> None:
        self._call(self._confirmed_set(key, value))

    def set_later(self, key: str, value: str) -> Future[None]:
        """Set a value, after all earlier calls, without waiting for it. A broken connection loses it."""
        return self._client.call_later(self._confirmed_set(key, value))

    def _confirmed_set(self, key: str, value: str) -> Callable[[Any], None]:
        def confirmed(store: Any) -> None:
            store.set(self._prefix + key, value)
            store.check([self._prefix + key])  # a set has no answer: a broken connection would lose it

        return confirmed

    def get(self, key: str) -> bytes:
        """Return a value, once it has been set; raise RankLost at the deadline."""
        began = time.monotonic()
        if not self.wait([key], self.timeout_s):
            raise RankLost(f"the other processes have not set {key!r} for {self.timeout_s:.0f} s")
        remaining_s = max(BACKOFF_S, self.timeout_s - (time.monotonic() - began))
        value: bytes = self._call(lambda store: store.get(self._prefix + key), remaining_s)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. If the connection breaks meanwhile, the amount may be added twice."""
        total: int = self._call(lambda store: store.add(self._prefix + key, amount))
        return total

    def append(self, key: str, value: str) -> None:
        """Append to a value. If the connection breaks meanwhile, the value may be appended twice."""

        def confirmed(store: Any) -> None:
            store.append(self._prefix + key, value)
            store.check([self._prefix + key])

        self._call(confirmed)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have been set."""
        prefixed = [self._prefix + key for key in keys]
        found: bool = self._call(lambda store: store.check(prefixed))
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace an expected value by another; return the value that is there then."""
        value: bytes = self._call(lambda store: store.compare_set(self._prefix + key, expected, desired))
        return value

    def wait(self, keys: Sequence[str], patience_s: float) -> bool:
        """Wait until all keys have been set; return whether they are."""
        return wait_for(lambda: self.check(keys), patience_s)

    def _copy(self, timeout_s: float, prefix: str) -> DeadlineStore:
        copy = DeadlineStore.__new__(DeadlineStore)
        copy.timeout_s, copy._prefix, copy._client = timeout_s, prefix, self._client
        return copy

    def _call(self, function: Callable[[Any], T], patience_s: float | None = None) -> T:
        return self._client.call(function, self.timeout_s if patience_s is None else patience_s)


class _Client:
    """Client of a store, shared by all who call the same store."""

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store
        self._broken = False  # whether this client's connection is of no use any more
        self._lock = Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[Any], Any]]] | None = None

    def call(self, function: Callable[[Any], T], patience_s: float) -> T:
        deadline, problem = time.monotonic() + patience_s, "it does not answer"
        while True:
            outcome: Future[T] = Future()
            calls = self._submit(outcome, function)
            try:
                return outcome.result(max(0.0, deadline - time.monotonic()))
            except Late as late:
                self._abandon(calls)
                raise RankLost(_words(patience_s, problem)) from late
            except (RuntimeError, OSError) as broken:  # whatever a store's client raises
                problem = str(broken).splitlines()[0] if str(broken) else type(broken).__name__
                self._abandon(calls)
                if time.monotonic() + BACKOFF_S > deadline:
                    raise RankLost(_words(patience_s, problem)) from broken
                time.sleep(BACKOFF_S)

    def call_later(self, function: Callable[[Any], T]) -> Future[T]:
        """Call once, after all earlier calls; the future has the result, or the client's error."""
        outcome: Future[T] = Future()
        self._submit(outcome, function)
        return outcome

    def _submit(self, outcome: Future[Any], function: Callable[[Any], Any]) -> SimpleQueue[Any]:
        """Queue a call for the running thread; start one if the last was abandoned, or had nothing to do."""
        with self._lock:
            if self._calls is None:
                self._calls = SimpleQueue()
                Thread(target=self._work, args=(self._calls, self._broken), daemon=True).start()
            self._calls.put((outcome, function))
            return self._calls

    def _abandon(self, calls: SimpleQueue[Any]) -> None:
        """Leave a thread whose connection is broken to itself; the next call reconnects."""
        with self._lock:
            if self._calls is calls:
                self._calls = None
                self._broken = True
        calls.put(None)

    def _work(self, calls: SimpleQueue[Any], reconnect: bool) -> None:
        store: Any = None if reconnect and hasattr(self._store, "clone") else self._store
        while (call := self._next(calls)) is not None:
            outcome, function = call
            try:
                store = self._store.clone() if store is None else store  # opens a connection of its own
                outcome.set_result(function(store))
            except Exception as failed:
                outcome.set_exception(failed)

    def _next(self, calls: SimpleQueue[Any]) -> Any:
        """Return the next call; None if there has been none for a while, or the thread was abandoned."""
        try:
            return calls.get(timeout=IDLE_S)
        except Empty:
            with self._lock:
                if not calls.empty():
                    return calls.get()
                if self._calls is calls:
                    self._calls = None
            return None


def _words(patience_s: float, problem: str) -> str:
    return f"the rendezvous store could not be reached for {patience_s:.0f} s: {problem}"
