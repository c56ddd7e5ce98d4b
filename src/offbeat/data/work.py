"""Shared work: all workers claim their next batches from one counter, so that nobody is idle before the end.

    claim    n ← the counter;  counter ← n + 1;  the worker trains batch n; none is left from n = total on
    bound    total / Σ 1/t  ≤  the last worker's end  ≤  total / Σ 1/t + max t,   t: seconds of a step

The bound is that of any list schedule: until the counter is exhausted nobody is idle, and then each worker
ends the batch that it has. Over a wire a claim is a round trip, so a worker claims its next batches while it
trains (`ClaimsAhead`). What a slow worker has claimed ahead would delay the end. So a worker claims ahead
only while three times as many batches are left as all claimed during its latest steps, of which it would have
to do as many: its pace may change until then, and what it claims ahead was counted some steps ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

AHEAD = 2  # batches that a worker claims before it needs them
AHEAD_LEFT = 16  # batches per worker that must be left for that, before its pace is known


class Claims(Protocol):
    """One worker's claims on the batches that all workers share."""

    def claim(self) -> int | None:
        """Return the number of this worker's next batch; None: no batch is left."""
        ...


class SharedCount:
    """A counter that all workers of one process share, in the order of their claims."""

    def __init__(self, total: int) -> None:
        self._numbers = iter(range(total))

    def claim(self) -> int | None:
        return next(self._numbers, None)


class ClaimsAhead:
    """Claims by a call that takes its time, made in the background before a batch is needed.

    take     counts up the counter of all workers, and returns its value before
    total    the number of batches
    spare    before the pace is known, claim ahead only while as many batches are left; 0: claim always ahead
    thread   makes the calls, one after another
    """

    def __init__(
        self, take: Callable[[], int], total: int, spare: int, thread: ThreadPoolExecutor | None = None
    ) -> None:
        self._take = take
        self._total = total
        self._spare = spare
        self._claimed: deque[Future[int]] = deque()
        self._latest: deque[int] = deque(maxlen=2 * AHEAD + 3)  # numbers; some were claimed together
        self._thread = thread or ThreadPoolExecutor(1, "offbeat-claims")
        self._exhausted = False

    def claim(self) -> int | None:
        if self._exhausted:
            return None
        if not self._claimed:
            self._ask()
        number = self._claimed.popleft().result()
        if number >= self._total:
            self._exhausted = True
            return None
        self._latest.append(number)
        if self._total - number >= self._needed():
            while len(self._claimed) < AHEAD:
                self._ask()
        return number

    def _needed(self) -> int:
        """Return how many batches must be left for claims ahead."""
        if not self._spare or len(self._latest) < 2 * AHEAD + 3:
            return self._spare
        return 3 * (self._latest[-1] - self._latest[AHEAD + 1])  # claimed by all, while it did AHEAD + 1

    def _ask(self) -> None:
        self._claimed.append(self._thread.submit(self._take))
