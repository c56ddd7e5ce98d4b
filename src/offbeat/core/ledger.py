"""Ledger: what one worker's port saw. Bytes, seconds and waits are counted here and nowhere else.

    compute_s       seconds in which the worker was not blocked by the others
    wait_s          seconds in which it was: compute_s + wait_s is the training time
    communicate_s   seconds in which an operation of its own was under way, hidden behind computing or not
    bytes_sent      what left its NIC
    sync_steps      steps in which it exchanged weights or gradients; the others are local_steps
    lssr            local_steps / steps: SelSync's "local to synchronous steps ratio"

The clock is handed in, real or virtual. Evaluation is not training: inside `paused()` nothing is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from offbeat.core.port import Usage

CONTROL_BYTES = 64
"""Anything smaller is control traffic, a flag or a count, and does not make a step a synchronized one.

Weights and gradients are never smaller: in their flat buffers every parameter takes at least this much.
"""


class Span(NamedTuple):
    """A stretch of a worker's time: what it was, which one of its kind, from when to when."""

    kind: str  # "step", "waiting", "evaluating", the lane of an operation, or what it is to a server
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class WorkerTotals:
    """A worker's totals, as `summary.json` shows them."""

    rank: int
    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    communicate_s: float = 0.0
    wait_s: float = 0.0
    bytes_sent: int = 0
    sync_steps: int = 0
    local_steps: int = 0
    lssr: float = 0.0
    planned_steps: int = 0  # from one exchange to the next, where somebody plans them
    refused: int = 0  # updates that the server did not take: they were not finite, or too late
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness: dict[str, int] = field(default_factory=dict)  # how many reads were how far behind

    @property
    def seconds(self) -> float:
        """Training time."""
        return self.compute_s + self.wait_s


class Ledger:
    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.clock = clock
        self.steps = self.sync_steps = self.samples = self.bytes_sent = 0
        self.communicate_s = self.wait_s = 0.0
        self._began: float | None = None  # when training time last started to run
        self._before = 0.0  # training time of earlier stretches
        self._pauses = 0
        self._operations = 0  # with weights or gradients, started in this step
        self._asides = 0
        self._under_way = 0
        self.emulated = False  # transfers are shaped: real seconds do not count, `communicated` ones do
        self._under_way_since = 0.0
        self._hosted = 0
        self.refused = 0  # updates that the server did not take
        self.combined = 0  # bytes that the server was given to add up
        self.gauges: dict[str, float] = {}  # the latest value of each number that a strategy reports
        self.staleness: Counter[int] = Counter()  # how often a read was how far behind
        self._stepped_at = 0.0
        self.spans: MutableSequence[Span] | None = (
            None  # a list, where a timeline is wanted; a deque: its end
        )

    # --- written by the ports and the conductor

    def start(self) -> None:
        """Training time runs from here."""
        if self._began is None and not self._pauses:
            self._began = self.clock()

    def stop(self) -> None:
        """Training is over: whatever the clock does, nothing is counted any more."""
        self._before, self._began = self.seconds, None
        self._pauses += 1

    def sent(self, nbytes: int) -> None:
        if not self._pauses:
            self.bytes_sent += nbytes

    def waited(self, seconds: float) -> None:
        if not self._pauses:
            self.wait_s += seconds
            if self.spans is not None:
                self._keep("waiting", "", self.clock() - seconds)

    def under_way(self, change: int, nbytes: int = CONTROL_BYTES) -> None:
        """An operation of this worker, on so many bytes, starts (+1) or ends (-1)."""
        now = self.clock()
        if self._under_way and not self._pauses and not self.emulated:
            self.communicate_s += now - self._under_way_since
        self._under_way += change
        if change > 0 and nbytes >= CONTROL_BYTES and not self._pauses and not self._asides:
            self._operations += 1
        self._under_way_since = now

    def hosted(self, nbytes: int) -> None:
        """The server's shard beside this worker has so far sent so many bytes out of the same NIC."""
        if not self._pauses:
            self.bytes_sent += nbytes - self._hosted
        self._hosted = nbytes

    def record_staleness(self, staleness: int) -> None:
        """Weights were read whose slowest updates lag behind by so many clocks."""
        if not self._pauses:
            self.staleness[staleness] += 1

    def record(self, **gauges: float) -> None:
        """Keep the latest value of each gauge, such as `planned_steps`."""
        self.gauges.update(gauges)

    def communicated(self, seconds: float) -> None:
        """An emulated transfer would have kept the NIC busy for so long."""
        if not self._pauses:
            self.communicate_s += seconds

    def record_span(self, kind: str, name: str, start_s: float, end_s: float | None = None) -> None:
        """An operation of this worker has ended, just now or then."""
        if not self._pauses:
            self._keep(kind, name, start_s, end_s)

    def step(self) -> None:
        self.steps += 1
        if self.spans is not None:
            self._keep("step", str(self.steps), max(self._stepped_at, self._began or 0.0))
            self._stepped_at = self.clock()
        self.sync_steps += self._operations > 0
        self._operations = 0

    @contextmanager
    def uncounted_sync(self) -> Iterator[None]:
        """What is sent in here is counted, but is neither weights nor gradients: no synchronization."""
        self._asides += 1
        try:
            yield
        finally:
            self._asides -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.under_way(0)
        if self._began is not None:
            self._before = self.seconds
            self._began = None
        self._pauses += 1
        paused_at = self.clock()
        try:
            yield
        finally:
            self.under_way(0)
            self._pauses -= 1
            self._keep("evaluating", "", paused_at)
            self.start()

    def _keep(self, kind: str, name: str, start_s: float, end_s: float | None = None) -> None:
        if self.spans is not None:
            self.spans.append(Span(kind, name, start_s, self.clock() if end_s is None else end_s))

    # --- read by everybody

    @property
    def is_paused(self) -> bool:
        """Inside `paused()`."""
        return self._pauses > 0

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._before + (0.0 if self._began is None else self.clock() - self._began)

    @property
    def compute_s(self) -> float:
        return max(0.0, self.seconds - self.wait_s)

    def usage(self) -> Usage:
        self.under_way(0)
        return Usage(self.compute_s, self.communicate_s, self.bytes_sent, self.combined)

    def totals(self) -> WorkerTotals:
        return WorkerTotals(
            rank=self.rank,
            steps=self.steps,
            samples=self.samples,
            compute_s=self.compute_s,
            communicate_s=self.communicate_s,
            wait_s=self.wait_s,
            bytes_sent=self.bytes_sent,
            sync_steps=self.sync_steps,
            local_steps=self.steps - self.sync_steps,
            lssr=(self.steps - self.sync_steps) / max(1, self.steps),
            planned_steps=int(self.gauges.get("planned_steps", 0)),
            refused=self.refused,
            staleness_mean=sum(k * n for k, n in self.staleness.items()) / max(1, self.staleness.total()),
            staleness_max=max(self.staleness, default=0),
            staleness={str(k): n for k, n in sorted(self.staleness.items())},
        )


class SharedLedger(Ledger):
    """The ledger of a real worker, whose operations end on other threads. In virtual time there are none."""

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        super().__init__(rank, clock)
        self._lock = Lock()

    def under_way(self, change: int, nbytes: int = CONTROL_BYTES) -> None:
        with self._lock:
            super().under_way(change, nbytes)
