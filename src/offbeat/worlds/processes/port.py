"""Port of a real process, on torch.distributed (gloo or NCCL).

Each lane has a process group of its own, because work on one group runs in order: operations of the back lane
must not delay those of the front lane. Every wait ends: with the result, with an error that names the rank
that is missing, or by the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.codecs import Codec
from offbeat.core.ledger import Ledger
from offbeat.core.port import Arrived, Lane, Op, Pending, PullResult, Usage, check_slices
from offbeat.errors import RankLost
from offbeat.worlds.processes.emulation import Shaper
from offbeat.worlds.processes.failure import FailureDetector
from offbeat.worlds.processes.pairwise import PairwiseExchange

T = TypeVar("T")
PATIENCE_S = 2.0  # seconds to block before checking that the other ranks are still there

_REDUCTIONS = {Op.SUM: dist.ReduceOp.SUM, Op.MEAN: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}


class Server(Protocol):
    """The way to a parameter server, for strategies that have one."""

    def travel(self, forms: Sequence[Codec], answered_in: Codec | None) -> None: ...
    def open(self, weights: list[Tensor], part: int = 0) -> None: ...
    def restart(self) -> None: ...
    def push(
        self, update: list[Tensor], clock: int, report: Sequence[float] = (), form: int = 0
    ) -> Pending[bool]: ...
    def pull(self, into: list[Tensor], clock: int | None, part: int = 0) -> Pending[PullResult]: ...
    def combine(self, tensor: Tensor, op: Op) -> Pending[Tensor]: ...
    def leave(self) -> None: ...
    def close(self, patience_s: float) -> None: ...


class ProcessPort:
    """One rank's connection to all other ranks."""

    def __init__(
        self,
        groups: dict[Lane, dist.ProcessGroup],
        failures: FailureDetector,
        ledger: Ledger,
        timeout_s: float,
        shaper: Shaper | None = None,
        standalone: bool = False,
    ) -> None:
        self.rank = failures.rank
        self.world = failures.world
        self.ledger = ledger
        self.failures = failures
        self.operations = 0
        self.timeout_s = timeout_s
        self.shaper = shaper
        self.standalone = standalone  # reaches the other workers through a server only
        self.server: Server | None = None
        self._groups = groups
        self._exchanges: dict[Lane, PairwiseExchange] = {}  # made by a lane's first exchange

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        if op is Op.MEAN:  # before the sum, as DDP does: the same bits, and no overflow
            tensor.mul_(1 / self.world)
        work = dist.all_reduce(tensor, _REDUCTIONS[op], self._groups[lane], async_op=True)
        return self._track(lane, work, tensor, 2 * tensor.nbytes * (self.world - 1) // self.world)

    def broadcast(self, tensor: Tensor, root: int = 0, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        if self.world == 1:
            return Arrived(tensor)
        work = dist.broadcast(tensor, root, self._groups[lane], async_op=True)
        # Each rank but the last of the tree forwards about one copy.
        return self._track(lane, work, tensor, tensor.nbytes * (self.world - 1) // self.world)

    def record(self, **gauges: float) -> None:
        self.ledger.record(**gauges)

    def usage(self) -> Usage:
        return self.ledger.usage()

    def reduce_scatter(
        self, shares: list[Tensor], op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[Tensor]:
        check_slices(shares, self.world)
        own = shares[self.rank]
        if self.world == 1:
            return Arrived(own)
        work: Any
        if exchange := self._exchange(lane, own.device):
            work = exchange.reduce_scatter(shares, op)
        else:
            if op is Op.MEAN:
                torch._foreach_mul_(shares, 1 / self.world)
            work = dist.reduce_scatter(own, shares, _REDUCTIONS[op], self._groups[lane], async_op=True)
        return self._track(lane, work, own, sum(share.nbytes for share in shares) - own.nbytes)

    def all_gather(self, shares: list[Tensor], lane: Lane = Lane.FRONT) -> Pending[list[Tensor]]:
        check_slices(shares, self.world)
        own = shares[self.rank]
        if self.world == 1:
            return Arrived(shares)
        work: Any
        if exchange := self._exchange(lane, own.device):
            work = exchange.all_gather(shares)
        else:
            work = dist.all_gather(shares, own, self._groups[lane], async_op=True)
        return self._track(lane, work, shares, (self.world - 1) * own.nbytes)

    def all_to_all(
        self, away: list[Tensor], into: list[Tensor], lane: Lane = Lane.FRONT
    ) -> Pending[list[Tensor]]:
        check_slices(away, self.world)
        check_slices(into, self.world)
        if self.world == 1:
            return Arrived(into)
        work: Any
        if exchange := self._exchange(lane, away[self.rank].device):
            work = exchange.all_to_all(away, into)
        else:
            sent, landed = ([t[:0] if k == self.rank else t for k, t in enumerate(ts)] for ts in (away, into))
            work = dist.all_to_all(landed, sent, self._groups[lane], async_op=True)
        return self._track(lane, work, into, sum(t.nbytes for t in away) - away[self.rank].nbytes)

    def push(
        self, update: list[Tensor], clock: int, report: Sequence[float] = (), form: int = 0
    ) -> Pending[bool]:
        assert self.server is not None
        return self.server.push(update, clock, report, form)

    def combine(self, tensor: Tensor, op: Op = Op.MEAN) -> Pending[Tensor]:
        assert self.server is not None
        return Arrived(tensor) if self.world == 1 else self.server.combine(tensor, op)

    def pull(self, into: list[Tensor], clock: int | None, part: int = 0) -> Pending[PullResult]:
        assert self.server is not None
        return self.server.pull(into, clock, part)

    def close(self) -> None:
        """Release connections, groups and threads; every operation must have ended."""
        if self.server is not None:
            self.server.close(self.timeout_s)
        while self._exchanges:
            self._exchanges.popitem()[1].close()
        # Nothing else may hold a group: freed on another thread, by a late callback, it would abort.
        groups, self._groups = self._groups, {}
        while groups:
            dist.destroy_process_group(groups.popitem()[1])

    def abandon(self) -> None:
        """End, after a failure, the exchanges in progress, which would wait for other ranks."""
        while self._exchanges:
            self._exchanges.popitem()[1].abandon()

    def _exchange(self, lane: Lane, device: torch.device) -> PairwiseExchange | None:
        """Return the lane's pairwise exchange on gloo; None on NCCL, which takes slices of any size."""
        group = self._groups[lane]
        if group._get_backend(device).name() != "gloo":
            return None
        if lane not in self._exchanges:
            self._exchanges[lane] = PairwiseExchange(group, self.rank, self.world)
        return self._exchanges[lane]

    def _track(self, lane: Lane, work: Any, value: T, nbytes: int) -> Pending[T]:
        """Count an operation that has started, and return its pending result."""
        self.operations += 1
        self.ledger.sent(nbytes)
        return CollectiveOperation(self, lane, work, value, nbytes)


class CollectiveOperation(Pending[T], Generic[T]):
    """A collective or an exchange in progress."""

    def __init__(self, port: ProcessPort, lane: Lane, work: Any, value: T, nbytes: int) -> None:
        self._port = port
        self._work = work
        self._value = value
        self._nbytes = nbytes
        self._lane = lane
        self._number = port.operations
        self._started_at = time.monotonic()
        self._error: RankLost | None = None
        self._delivered_at: float | None = None
        self._lock = Lock()
        port.ledger.under_way(+1, nbytes)
        work.get_future().add_done_callback(lambda _: self._deliver())  # on another thread

    def done(self) -> bool:
        return bool(self._work.is_completed()) and self._deliver() <= time.monotonic()

    def result(self) -> T:
        self._block()  # returns at once, raises a late error, and orders NCCL's streams
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> None:
        began = time.monotonic()
        self._block()
        if self._error is None:
            time.sleep(max(0.0, self._deliver() - time.monotonic()))
        self._port.ledger.waited(time.monotonic() - began)

    def _deliver(self) -> float:
        """Return when the result counts as delivered, now that the real transfer has ended.

        That is at once, unless a slower link is emulated.
        """
        with self._lock:
            if self._delivered_at is None:
                self._port.ledger.under_way(-1)
                self._port.ledger.record_span(self._lane.value, str(self._number), self._started_at)
                self._delivered_at = 0.0
                if shaper := self._port.shaper:
                    self._delivered_at = shaper.deliver(self._nbytes)
                    shaper.delivered(self._nbytes)
            return self._delivered_at

    def _block(self) -> None:
        deadline = time.monotonic() + self._port.timeout_s
        while self._error is None:
            completed = bool(self._work.is_completed())
            try:
                self._work.wait(timedelta(seconds=PATIENCE_S))
                return
            except RuntimeError as failed:
                self._error = self._diagnose(failed, completed, time.monotonic() > deadline)

    def _diagnose(self, failed: RuntimeError, completed: bool, timed_out: bool) -> RankLost | None:
        """Return the error that names the missing rank; None if only `PATIENCE_S` has passed."""
        failures = self._port.failures
        if completed:
            return failures.diagnose(str(failed))
        if self._work.is_completed():  # just now: the next wait returns at once, with a result or an error
            return None
        if timed_out:
            return failures.diagnose(f"nothing came for {self._port.timeout_s:.0f} s")
        return failures.check(self._number)
