"""Ledger: the measurements of one worker. Bytes, seconds and waits are counted here and nowhere else.

    compute_s       seconds in which the worker was not blocked by the others
    wait_s          seconds in which the others blocked it: compute_s + wait_s is the training time
    communicate_s   seconds in which one of its operations was in flight, hidden behind computing or not
    bytes_sent      bytes that it sent, and that a server's shard beside it sent
    bytes_left_host bytes of these that went to another host; the others stayed in memory or on loopback
    bytes_server    bytes that a server on machines of its own sent to the worker, or to copies for it
    sync_steps      steps in which it exchanged weights or gradients; the others are local_steps
    lssr            local_steps / steps: SelSync's "local to synchronous steps ratio"

The clock is passed in, real or virtual. Evaluation is not training: inside `paused()` neither time nor bytes
are counted, except for the bytes of a server's shard.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.core.port import Notice, Usage

CONTROL_BYTES = 64
"""The size below which an operation is control traffic, a flag or a count, and makes no step a sync step.

Weights and gradients are never smaller: in their flat buffers every parameter takes at least this much.
"""


KEPT_EVENTS = 32
"""The number of events of a worker that its totals carry: the latest."""

AT_SERVER = "at the server"
"""The kind of a span from a request's arrival at the server until the answer leaves it."""


class Span(NamedTuple):
    """An interval of a worker's time, for a timeline."""

    # "step", "forward", "backward", "waiting", "evaluating", AT_SERVER, the lane of an operation, or the kind
    # of a request to a server
    kind: str
    name: str
    start_s: float
    end_s: float
    operation: str = ""  # what is exchanged on a lane: all_reduce, ...; of AT_SERVER: push, pull, ...
    nbytes: int = 0  # of the tensors of an operation; of a request, there and back
    staleness: int | None = None  # of the weights that a pull has brought


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
    bytes_left_host: int = 0  # of bytes_sent
    bytes_server: int = 0  # came from a server on machines of its own
    sync_steps: int = 0
    local_steps: int = 0
    lssr: float = 0.0
    planned_steps: int = 0  # local steps per exchange, under strategies that plan them
    refused: int = 0  # updates that the server refused: they were not finite, or too late
    outliers: int = 0  # changes that were left out of a merge, under strategies that guard against them
    rosters: int = 0  # that the worker has entered, if elastic
    lost_steps: int = 0  # that were never exchanged, because the worker died or was dropped
    lost_s: float = 0.0  # in exchanges that failed, until those who were left had connected anew
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness: dict[str, int] = field(default_factory=dict)  # number of reads by staleness
    events: list[tuple[int, float, str, str]] = field(default_factory=list)  # number, seconds, kind, text

    @property
    def seconds(self) -> float:
        """Training time, in seconds."""
        return self.compute_s + self.wait_s

    @property
    def bytes_total(self) -> int:
        """Bytes that the worker sent, and that a server on machines of its own sent for it."""
        return self.bytes_sent + self.bytes_server


class Ledger:
    """The counters of one worker, for one thread."""

    def __init__(self, rank: int, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.clock = clock
        self.steps = self.sync_steps = self.samples = 0
        self.bytes_sent = self.bytes_left_host = self.bytes_server = 0
        self.communicate_s = self.wait_s = 0.0
        self.refused = 0  # updates that the server refused
        self.rosters = self.lost_steps = 0
        self.lost_s = 0.0
        self.server_reduced = 0  # bytes that the server has reduced for this worker
        self.pushes_seen = 0  # of all workers, in the server's weights that this one last read to train on
        self.staleness: Counter[int] = Counter()  # number of reads by staleness
        self.gauges: dict[str, float] = {}  # the latest value of each number that a strategy reports
        self.events: deque[tuple[int, float, str, str]] = deque(maxlen=KEPT_EVENTS)
        self.emulated = False  # transfers are emulated: only seconds of `communicated` count
        self.spans: MutableSequence[Span] | None = None  # a list records a whole timeline, a deque its end
        self._began: float | None = None  # when training time last started to run
        self._before = 0.0  # training time until then
        self._pauses = 0
        self._operations = 0  # on weights or gradients, started in this step
        self._synced_at = 0  # the last sync step
        self._uncounted = 0  # depth of `uncounted_sync`
        self._in_flight = 0
        self._in_flight_since = 0.0  # communicate_s is counted up to here
        self._shard_sent = 0
        self._stepped_at = 0.0

    # --- counting, by the ports and the conductor

    def start(self) -> None:
        """Start, or resume, the training time."""
        if self._began is None and not self._pauses:
            self._began = self.clock()

    def stop(self) -> None:
        """End training: from now on nothing is counted."""
        self._before, self._began = self.seconds, None
        self._pauses += 1

    def lose_steps(self) -> None:
        """Count the steps since the last exchange as lost: the worker died, or was dropped."""
        self.lost_steps += self.steps - self._synced_at
        self._synced_at = self.steps

    def resume(self, seconds: float) -> None:
        """Go on after `stop`, at this training time. The worker was away meanwhile, and waited."""
        self.wait_s += seconds - self._before
        self._before = seconds
        self._pauses = self._operations = self._in_flight = 0
        self.start()

    def count_samples(self, count: int) -> None:
        """Count samples that this worker trained on."""
        self.samples += count

    def count_refusal(self) -> None:
        """Count an update that the server refused."""
        self.refused += 1

    def count_server_reduce(self, nbytes: int) -> None:
        """Count bytes that the server reduces for this worker."""
        self.server_reduced += nbytes

    def record(self, *events: Notice, **gauges: float) -> None:
        """Record events, and the latest value of each gauge, such as `planned_steps`."""
        self.gauges.update(gauges)
        for event in events:
            number = self.events[-1][0] + 1 if self.events else 1
            self.events.append((number, self.seconds, *event))

    def sent(self, nbytes: int, left_host: int | None = None) -> None:
        """Count bytes that this worker sends, and how many of them leave its host; by default all."""
        if not self._pauses:
            self.bytes_sent += nbytes
            self.bytes_left_host += nbytes if left_host is None else left_host

    def sent_even_paused(self, nbytes: int) -> None:
        """Count bytes to other hosts, even while paused: of a shard beside this worker, or started before."""
        self.bytes_sent += nbytes
        self.bytes_left_host += nbytes

    def server_sent(self, nbytes: int) -> None:
        """Count bytes that a server on machines of its own sends to this worker."""
        if not self._pauses:
            self.bytes_server += nbytes

    def update_shard_sent(self, nbytes: int) -> None:
        """Set the bytes that the shard beside this worker has sent to other hosts; count the new ones."""
        new, self._shard_sent = nbytes - self._shard_sent, nbytes
        self.sent(new)

    def waited(self, seconds: float, looked_s: float = 0.0) -> None:
        """Count seconds, up to now, in which other workers blocked this one.

        Of these, the last `looked_s` are not counted as time at all: another worker evaluated.
        """
        if not self._pauses:
            self.wait_s += seconds - looked_s
            self._before -= looked_s
            self.communicate_s -= 0.0 if self.emulated else looked_s
            if self.spans is not None:
                began_s, ended_s = (self.clock() - each for each in (seconds, looked_s))
                self.spans.append(Span("waiting", "", began_s, ended_s))
                if looked_s:
                    self._append_span("evaluating", "", ended_s)

    def operation_started(self, nbytes: int = CONTROL_BYTES) -> None:
        """Count an operation of this worker on `nbytes`, which starts now."""
        self._count_operations(+1, nbytes)

    def operation_ended(self) -> None:
        """Count the end of an operation of this worker, now."""
        self._count_operations(-1)

    def _count_operations(self, change: int, nbytes: int = 0) -> None:
        """Count communicate_s up to now, and change the number of operations in flight by `change`."""
        now = self.clock()
        if self._in_flight and not self._pauses and not self.emulated:
            self.communicate_s += now - self._in_flight_since
        self._in_flight += change
        if change > 0 and nbytes >= CONTROL_BYTES and not self._pauses and not self._uncounted:
            self._operations += 1
        self._in_flight_since = now

    def lost(self, since_s: float) -> float:
        """Count the time since then as lost, because other workers were; return the time now."""
        now = self.clock()
        if not self._pauses:
            self.lost_s += now - since_s
        return now

    def emulate_transfers(self) -> None:
        """Stop counting the real seconds of transfers: `communicated` counts emulated ones."""
        self.emulated = True

    def communicated(self, seconds: float) -> None:
        """Count the time for which an emulated transfer keeps the NIC busy."""
        if not self._pauses:
            self.communicate_s += seconds

    def record_staleness(self, staleness: int) -> None:
        """Count a read of weights that lack the slowest worker's last `staleness` updates."""
        if not self._pauses:
            self.staleness[staleness] += 1

    def record_span(
        self,
        kind: str,
        name: str,
        start_s: float,
        end_s: float | None = None,
        *,
        operation: str = "",
        nbytes: int = 0,
        staleness: int | None = None,
    ) -> None:
        """Add an operation, or a part of a step, to the timeline; `end_s` None: it ends now."""
        if not self._pauses and self.spans is not None:
            end_s = self.clock() if end_s is None else end_s
            self.spans.append(Span(kind, name, start_s, end_s, operation, nbytes, staleness))

    def step(self) -> None:
        """Count a step, which ends now."""
        self.steps += 1
        if self.spans is not None:
            self._append_span("step", str(self.steps), max(self._stepped_at, self._began or 0.0))
        self._stepped_at = self.clock()
        if self._operations:
            self.sync_steps += 1
            self._synced_at = self.steps
        self._operations = 0

    @contextmanager
    def uncounted_sync(self) -> Iterator[None]:
        """Count bytes sent in this context, but no sync step: they are neither weights nor gradients."""
        self._uncounted += 1
        try:
            yield
        finally:
            self._uncounted -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the training time, for an evaluation."""
        self._count_operations(0)
        if self._began is not None:
            self._before = self.seconds
            self._began = None
        self._pauses += 1
        paused_at = self.clock()
        try:
            yield
        finally:
            self._count_operations(0)
            self._pauses -= 1
            if not self._pauses:
                self._append_span("evaluating", "", paused_at)
            self.start()

    def _append_span(self, kind: str, name: str, start_s: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(kind, name, start_s, self.clock()))

    # --- readings

    @property
    def is_paused(self) -> bool:
        """True while nothing is counted: inside `paused()`, or after `stop`."""
        return self._pauses > 0

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds."""
        return self._before + (0.0 if self._began is None else self.clock() - self._began)

    @property
    def compute_s(self) -> float:
        """Training time in which the others did not block this worker, in seconds."""
        return max(0.0, self.seconds - self.wait_s)

    def usage(self) -> Usage:
        """Return the seconds and bytes so far, as strategies see them."""
        self._count_operations(0)
        return Usage(self.compute_s, self.communicate_s, self.bytes_sent, self.server_reduced, self.wait_s)

    def totals(self) -> WorkerTotals:
        """Return the totals so far."""
        return WorkerTotals(
            rank=self.rank,
            steps=self.steps,
            samples=self.samples,
            compute_s=self.compute_s,
            communicate_s=self.communicate_s,
            wait_s=self.wait_s,
            bytes_sent=self.bytes_sent,
            bytes_left_host=self.bytes_left_host,
            bytes_server=self.bytes_server,
            sync_steps=self.sync_steps,
            local_steps=self.steps - self.sync_steps,
            lssr=(self.steps - self.sync_steps) / max(1, self.steps),
            planned_steps=int(self.gauges.get("planned_steps", 0)),
            refused=self.refused,
            outliers=int(self.gauges.get("outliers", 0)),
            rosters=self.rosters,
            lost_steps=self.lost_steps,
            lost_s=self.lost_s,
            staleness_mean=sum(k * n for k, n in self.staleness.items()) / max(1, self.staleness.total()),
            staleness_max=max(self.staleness, default=0),
            staleness={str(k): n for k, n in sorted(self.staleness.items())},
            events=list(self.events),
        )
