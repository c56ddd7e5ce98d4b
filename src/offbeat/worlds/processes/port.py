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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.ledger import Ledger
from offbeat.core.pending import Pending
from offbeat.core.port import CollectivePort, Lane, Op, ServerPort, Signature
from offbeat.errors import RankLost
from offbeat.worlds.processes.emulation import Shaper
from offbeat.worlds.processes.failure import ExitCount, FailureDetector
from offbeat.worlds.processes.hosts import Hosts
from offbeat.worlds.processes.pairwise import PairwiseExchange

if TYPE_CHECKING:
    from offbeat.worlds.processes.server.rank_lease import RankLease
    from offbeat.worlds.processes.server.transport import ProcessServerClient

T = TypeVar("T")
PATIENCE_S = 2.0  # seconds to block before checking that the other ranks are still there

_REDUCTIONS = {Op.SUM: dist.ReduceOp.SUM, Op.MEAN: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SENT_AS_THEY_ARE = {
    *_FLOATS,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}  # others: as bytes


class ProcessPort(CollectivePort):
    """One rank's connection to all other ranks."""

    def __init__(
        self,
        groups: dict[Lane, dist.ProcessGroup],
        failures: FailureDetector,
        ledger: Ledger,
        timeout_s: float,
        shaper: Shaper | None = None,
        lease: RankLease | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        super().__init__(failures.rank, failures.world, ledger)
        self._hosts = hosts or Hosts(self.rank, [0] * self.world)
        self.global_rank = failures.names[failures.rank]
        self.failures = failures
        self.members: ProcessPort | None = None  # to the other ranks of this replica, if there are any
        self.exits: ExitCount | None = None  # of all groups, where there are several
        self.operations = 0
        self.timeout_s = timeout_s
        self.shaper = shaper
        self.standalone = lease is not None  # reaches the other workers through a server only
        self._lease = lease  # of a standalone worker on its rank
        self.client: ProcessServerClient | None = None  # the parameter server's, if there is one
        self._groups = groups
        self._exchanges: dict[Lane, PairwiseExchange] = {}  # made by a lane's first exchange

    def _server_port(self) -> ServerPort | None:
        return self.client

    def _start(self, signature: Signature, tensors: Sequence[Tensor], value: T, lane: Lane) -> Pending[T]:
        start = {
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
            "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather,
            "all_to_all": self._all_to_all,
        }[signature.operation]
        work, nbytes, left_host = start(signature, list(tensors), lane)
        self.operations += 1
        self.ledger.sent(nbytes, left_host)
        return CollectiveOperation(self, signature, lane, work, value, nbytes)

    # Each of these starts an operation, and returns torch's handle of it, the bytes that this rank sends, and
    # how many of them leave its host.

    def _all_reduce(self, signature: Signature, tensors: list[Tensor], lane: Lane) -> tuple[Any, int, int]:
        (tensor,), op = tensors, Op(signature.detail)
        if op is Op.MEAN:  # before the sum, as DDP does: the same bits, and no overflow
            tensor.mul_(1 / self.world)
        work = dist.all_reduce(tensor, _REDUCTIONS[op], self._groups[lane], async_op=True)
        sent = 2 * tensor.nbytes * (self.world - 1) // self.world
        return work, sent, self._hosts.left_by_ring(sent)

    def _broadcast(self, signature: Signature, tensors: list[Tensor], lane: Lane) -> tuple[Any, int, int]:
        (tensor,) = tensors
        root = self.failures.names[int(signature.detail)]
        if tensor.dtype not in _SENT_AS_THEY_ARE and not tensor.is_complex():
            tensor = tensor.view(-1).view(torch.uint8)
        work = dist.broadcast(tensor, root, self._groups[lane], async_op=True)
        # Each rank but the last of the tree forwards about one copy.
        sent = tensor.nbytes * (self.world - 1) // self.world
        return work, sent, self._hosts.left_by_tree(sent)

    def _reduce_scatter(self, signature: Signature, slices: list[Tensor], lane: Lane) -> tuple[Any, int, int]:
        own, op = slices[self.rank], Op(signature.detail)
        work: Any
        if exchange := self._exchange(lane, own.device):
            work = exchange.reduce_scatter(slices, op)
        else:
            if op is Op.MEAN:
                torch._foreach_mul_(slices, 1 / self.world)
            work = dist.reduce_scatter(own, slices, _REDUCTIONS[op], self._groups[lane], async_op=True)
        left_host = self._hosts.left_pairwise([t.nbytes for t in slices])
        return work, sum(signature.nbytes) - own.nbytes, left_host

    def _all_gather(self, signature: Signature, slices: list[Tensor], lane: Lane) -> tuple[Any, int, int]:
        own = slices[self.rank]
        work: Any
        if exchange := self._exchange(lane, own.device):
            work = exchange.all_gather(slices)
        else:
            work = dist.all_gather(slices, own, self._groups[lane], async_op=True)
        return work, (self.world - 1) * own.nbytes, self._hosts.left_pairwise([own.nbytes] * self.world)

    def _all_to_all(self, signature: Signature, tensors: list[Tensor], lane: Lane) -> tuple[Any, int, int]:
        outgoing, incoming = tensors[: self.world], tensors[self.world :]
        work: Any
        if exchange := self._exchange(lane, outgoing[self.rank].device):
            work = exchange.all_to_all(outgoing, incoming)
        else:  # a rank sends nothing to itself
            sent, received = (
                [t[:0] if k == self.rank else t for k, t in enumerate(ts)] for ts in (outgoing, incoming)
            )
            work = dist.all_to_all(received, sent, self._groups[lane], async_op=True)
        left_host = self._hosts.left_pairwise([t.nbytes for t in outgoing])
        return work, sum(signature.nbytes) - outgoing[self.rank].nbytes, left_host

    def backend(self, device: torch.device) -> str:
        """Return the library that carries tensors of this device: gloo or nccl."""
        name: str = self._groups[Lane.FRONT]._get_backend(device).name()
        return name

    @property
    def alone(self) -> bool:
        """True if there is no other rank to wait for or to tell: not even one of another group."""
        return self.world == 1 and self.members is None and self.exits is None

    def meet(self, call: str) -> None:
        """Wait until all ranks of the group, and then all members of this replica, are in this call."""
        self.failures.meet(call, self.operations, self.timeout_s)
        if self.members is not None:
            self.members.meet(call)

    def leave(self, reason: str) -> None:
        """Tell all ranks that this rank leaves; an empty `reason`: its loop has ended."""
        self.failures.leave(self.operations, reason)
        if self.members is not None:
            self.members.leave(reason)
        if self.exits is not None and reason:
            self.exits.count()

    def wait_for_exit(self) -> None:
        """Wait until all ranks have left."""
        self.failures.wait_for_exit(self.timeout_s)
        if self.members is not None:
            self.members.wait_for_exit()
        if self.exits is not None:
            self.exits.count()
            self.exits.wait(self.timeout_s)

    def close(self) -> None:
        """Release connections, groups and threads; every operation must have ended."""
        if self._lease is not None:
            self._lease.release()
        if self.members is not None:
            self.members.close()
        if self.client is not None:
            self.client.close(self.timeout_s)
        while self._exchanges:
            self._exchanges.popitem()[1].close()
        # No other object may hold a group: if a late callback freed it on another thread, it would abort.
        groups, self._groups = self._groups, {}
        while groups:
            dist.destroy_process_group(groups.popitem()[1])

    def abandon(self) -> None:
        """Abort the exchanges in progress after a failure; they would wait for the other ranks."""
        if self._lease is not None:
            self._lease.release()
        if self.members is not None:
            self.members.abandon()
        while self._exchanges:
            self._exchanges.popitem()[1].abandon()

    def _exchange(self, lane: Lane, device: torch.device) -> PairwiseExchange | None:
        """Return the lane's pairwise exchange on gloo; None on NCCL, which takes slices of any size."""
        if self.backend(device) != "gloo":
            return None
        if lane not in self._exchanges:
            self._exchanges[lane] = PairwiseExchange(self._groups[lane], self.rank, self.world)
        return self._exchanges[lane]


class CollectiveOperation(Pending[T], Generic[T]):
    """A collective or an exchange in progress."""

    def __init__(
        self, port: ProcessPort, signature: Signature, lane: Lane, work: Any, value: T, nbytes: int
    ) -> None:
        self._port = port
        self._signature = signature
        self._work = work
        self._value = value
        self._nbytes = nbytes
        self._lane = lane
        self._number = port.operations
        self._started_at = time.monotonic()
        self._error: RankLost | None = None
        self._delivered_at: float | None = None
        self._lock = Lock()
        port.ledger.operation_started(nbytes)
        work.get_future().add_done_callback(lambda _: self._deliver())  # on another thread

    def done(self) -> bool:
        return bool(self._work.is_completed()) and self._deliver() <= time.monotonic()

    def result(self) -> T:
        self._block()  # returns at once; notices an error, and orders NCCL's streams
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
        """Return the time at which the result counts as delivered, after the real transfer has ended.

        The result is delivered at once, unless a slower link is emulated.
        """
        with self._lock:
            if self._delivered_at is None:
                self._port.ledger.operation_ended()
                self._port.ledger.record_span(
                    self._lane.value,
                    str(self._number),
                    self._started_at,
                    operation=self._signature.operation,
                    nbytes=sum(self._signature.nbytes),
                )
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
        if self._work.is_completed():  # meanwhile: the next wait returns at once, with a result or an error
            return None
        if timed_out:
            return failures.diagnose(f"nothing arrived for {self._port.timeout_s:.0f} s")
        return failures.check(self._number)
