"""Pairwise exchange of slices between ranks on gloo, in rounds, on one thread per lane.

In round d every rank sends to the rank d after it and receives from the rank d before it: each NIC is busy
both ways, with one partner at a time. A thread, started by a lane's first exchange, runs the lane's exchanges
one after the other while the worker computes.

A lane's exchanges use the same process group as its collectives, and may run at the same time as collectives.
The two cannot be confused: gloo numbers collectives by itself, apart from messages, and a message's tag is
the number of its exchange, which is the same on all ranks, because all ranks call a lane in the same order.
Nor can they block each other: collectives run on gloo's threads, which wait for other ranks' collectives
only, and exchanges on ours, which wait for other ranks' exchanges only, in the same order everywhere. Their
tensors differ, because a tensor may not be passed in again before its result was awaited. So the outcome is
as if the lane had run all operations in order.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.port import Op
from offbeat.worlds.processes.gpu_copies import GpuCopies, NoCopies

TAGS = 1 << 31  # tags are positive, of 32 bits
IDLE_EXIT_S = 0.1  # to wait for the end of a thread without work
ABORT_EXIT_S = 5.0  # to wait for the end of a thread whose connections were closed
MAX_PIECES = 8  # of a slice that is reduced: a piece more saves memory, and costs a round trip per rank
PIECE_BYTES = 4 << 20  # the smallest piece: it takes much longer than a round trip


class QueuedWork:
    """Work for a lane's thread, with the interface of torch's `Work`, so that the port can wait for it."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self._future: Future[None] = Future()

    def run(self) -> None:
        """Do the work on the calling thread, and store its result or error."""
        try:
            self._do()
        except BaseException as failed:  # raised again on the worker's thread
            self._future.set_exception(failed)
        else:
            self._future.set_result(None)

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[None]:
        return self._future

    def wait(self, patience: timedelta) -> None:
        """Wait; unlike with gloo's messages, a wait that times out closes no connection."""
        try:
            self._future.result(patience.total_seconds())
        except TimeoutError:
            raise RuntimeError("an exchange is still in progress") from None


class ScratchBuffer:
    """Memory that all exchanges reuse, as large as the largest exchange so far needs."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """Return a tensor in the buffer; the tensor returned before is no longer valid.

        A GPU copies to and from `pinned` memory several times as fast, and while it computes.
        """
        nbytes = numel * dtype.itemsize
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._bytes[:nbytes].view(dtype)


class PairwiseExchange:
    """A lane's exchanges, and the thread that runs them."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world: int) -> None:
        self._group: Any = group
        self._rank = rank
        self._world = world
        self._started = 0
        self._receive_buffer = ScratchBuffer()
        self._host_buffer = ScratchBuffer()  # copies of slices that are on a GPU
        self._stream: torch.cuda.Stream | None = None  # for these copies
        self._queue: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="offbeat-exchange", daemon=True)
        self._thread.start()
        atexit.register(self.abandon)

    # --- on the worker's thread

    def reduce_scatter(self, slices: list[Tensor], op: Op) -> QueuedWork:
        if slices[0].is_cuda and op is Op.MEAN:
            torch._foreach_mul_(slices, 1 / self._world)  # a GPU does this in no time
            op = Op.SUM
        everything = range(self._world)
        return self._start(
            slices,
            everything,
            [self._rank],
            lambda parts, tag, copying: self._reduce_scatter(parts, op, tag, copying),
        )

    def all_gather(self, slices: list[Tensor]) -> QueuedWork:
        others = [k for k in range(self._world) if k != self._rank]
        return self._start(slices, [self._rank], others, self._all_gather)

    def all_to_all(self, outgoing: list[Tensor], incoming: list[Tensor]) -> QueuedWork:
        others = [k for k in range(self._world) if k != self._rank]
        received = [self._world + k for k in others]
        return self._start([*outgoing, *incoming], others, received, self._all_to_all)

    def close(self) -> None:
        """End the thread and release the group; every exchange must have ended."""
        self._queue.put(None)
        self._thread.join()
        self._group = None
        atexit.unregister(self.abandon)

    def abandon(self) -> None:
        """Abort the exchange in progress, if any, and end the thread.

        A thread that waits inside gloo when Python ends would crash the process. Only a timeout wakes it: a
        wait that times out closes all of the group's connections.
        """
        self._queue.put(None)
        self._thread.join(IDLE_EXIT_S)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                never = self._group.recv([torch.empty(1)], (self._rank + 1) % self._world, TAGS - 1)
                never.wait(timedelta(milliseconds=1))
            self._thread.join(ABORT_EXIT_S)
        atexit.unregister(self.abandon)

    def _start(
        self,
        tensors: list[Tensor],
        read: Sequence[int],
        written: Sequence[int],
        do: Callable[[list[Tensor], int, NoCopies], None],
    ) -> QueuedWork:
        """Queue an exchange that reads and writes these of the tensors, by number."""
        tag = self._started % (TAGS - 1)
        self._started += 1
        if tensors[0].is_cuda:
            ready = torch.cuda.current_stream(tensors[0].device).record_event()
            queued = QueuedWork(lambda: self._through_host(tensors, read, written, ready, tag, do))
        else:
            queued = QueuedWork(lambda: do(tensors, tag, NoCopies()))
        self._queue.put(queued)
        return queued

    # --- on the lane's thread

    def _work(self) -> None:
        with torch.no_grad():
            while (queued := self._queue.get()) is not None:
                queued.run()
                del queued  # otherwise it would keep its tensors alive until the next work arrives

    def _through_host(
        self,
        tensors: list[Tensor],
        read: Sequence[int],
        written: Sequence[int],
        ready: torch.cuda.Event,
        tag: int,
        do: Callable[[list[Tensor], int, NoCopies], None],
    ) -> None:
        """Run an exchange on host copies, which gloo's messages need."""
        sizes = [tensor.numel() for tensor in tensors]
        parts = self._host_buffer.take(sum(sizes), tensors[0].dtype, pinned=True).split(sizes)
        copies = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensors[0].device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            copying = GpuCopies(
                self._stream,
                [(tensors[k].view(-1), copies[k].view(-1)) for k in read],
                [(copies[k].view(-1), tensors[k].view(-1)) for k in written],
            )
            do(copies, tag, copying)
            copying.finish()

    def _reduce_scatter(self, slices: list[Tensor], op: Op, tag: int, copying: NoCopies) -> None:
        """Reduce slices piece by piece, so that the terms of all ranks need little memory."""
        slices = [part.view(-1) for part in slices]
        largest = max(slices, key=Tensor.numel)
        pieces = max(1, min(MAX_PIECES, largest.nbytes // PIECE_BYTES))
        size = max(1, -(-largest.numel() // pieces))
        starts = range(0, max(1, largest.numel()), size)
        copying.read([(start, start + size) for start in starts])
        for start in starts:
            copying.wait()
            self._reduce_pieces([part[start : start + size] for part in slices], op, tag)
            copying.write(start, start + size)

    def _reduce_pieces(self, slices: list[Tensor], op: Op, tag: int) -> None:
        """Reduce in the order of ranks: the same bits in any order of arrival, and in virtual time."""
        own = slices[self._rank]
        terms = self._terms(own)
        self._scale(slices[self._peer(1)], op)
        for distance in range(1, self._world):
            works = self._round(distance, slices[self._peer(distance)], terms[self._peer(-distance)], tag)
            self._scale(slices[self._peer(distance + 1)], op)  # the next to be sent; after the last, `own`
            _finish(works)
        combine = torch.maximum if op is Op.MAX else torch.add
        total = terms[0]
        for term in terms[1:-1]:
            combine(total, term, out=total)
        combine(total, terms[-1], out=own)

    def _all_gather(self, slices: list[Tensor], tag: int, copying: NoCopies) -> None:
        copying.read_all()
        for distance in range(1, self._world):
            _finish(self._round(distance, slices[self._rank], slices[self._peer(-distance)], tag))
        copying.write_all()

    def _all_to_all(self, both: list[Tensor], tag: int, copying: NoCopies) -> None:
        copying.read_all()
        outgoing, incoming = both[: self._world], both[self._world :]
        for distance in range(1, self._world):
            _finish(
                self._round(distance, outgoing[self._peer(distance)], incoming[self._peer(-distance)], tag)
            )
        copying.write_all()

    def _round(self, distance: int, outgoing: Tensor, incoming: Tensor, tag: int) -> list[Any]:
        """Start a round with the two peers at `distance`; return the works to wait for."""
        receive = [self._group.recv([incoming], self._peer(-distance), tag)] if incoming.numel() else []
        send = [self._group.send([outgoing], self._peer(distance), tag)] if outgoing.numel() else []
        return receive + send

    def _peer(self, distance: int) -> int:
        return (self._rank + distance) % self._world

    def _scale(self, tensor: Tensor, op: Op) -> None:
        if op is Op.MEAN:  # before the sum, as `all_reduce` does
            tensor.mul_(1 / self._world)

    def _terms(self, own: Tensor) -> list[Tensor]:
        """Return all ranks' terms of this rank's slice: `own`, and buffers to receive the others."""
        others = self._world - 1
        buffer = self._receive_buffer.take(others * own.numel(), own.dtype)
        received = buffer.view(others, *own.shape).unbind()
        return [*received[: self._rank], own, *received[self._rank :]]


def _finish(works: list[Any]) -> None:
    for work in works:
        work.wait()
