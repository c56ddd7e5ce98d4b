"""Exchange: shares between ranks on gloo, pairwise and in turn, on a thread a lane.

In turn d every rank sends to the rank d after it and receives from the rank d before it: each NIC is busy
both ways, with one partner at a time. Somebody has to take the turns while the worker computes: a thread,
started by a lane's first exchange, that does the lane's exchanges one after the other.

A lane's exchanges share its process group with its collectives, and may be under way at the same time as
they. The two cannot mix up: gloo numbers collectives by itself, apart from messages, and a message's tag is
the number of its exchange, which is the same on all ranks, as the order of calls on a lane is. Nor can they
block each other: collectives run on threads of gloo's, which wait for other ranks' collectives only, and ours
for other ranks' exchanges only, in the same order everywhere. Their tensors differ, as none may be handed in
again before its result was awaited. So all is as if the lane had run them in order.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
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

TAGS = 1 << 31  # tags are positive, of 32 bits
MOMENT_S = 0.1  # for a thread to end that has nothing more to do
GRACE_S = 5.0


class QueuedWork:
    """What a lane's thread is to do. The port waits for it as for a collective's `Work`."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self._future: Future[None] = Future()

    def run(self) -> None:
        try:
            self._do()
        except BaseException as failed:  # the worker's thread is to see it
            self._future.set_exception(failed)
        else:
            self._future.set_result(None)

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[None]:
        return self._future

    def wait(self, patience: timedelta) -> None:
        """Unlike a wait for gloo's messages, one that runs out harms nothing."""
        try:
            self._future.result(patience.total_seconds())
        except TimeoutError:
            raise RuntimeError("an exchange is still under way") from None


class ScratchBuffer:
    """Memory that is kept from exchange to exchange, as large as the largest so far needs."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[:nbytes].view(dtype)


class PairwiseExchange:
    """A lane's exchanges, and the thread that does them."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world: int) -> None:
        self._group: Any = group
        self._rank = rank
        self._world = world
        self._started = 0
        self._landing = ScratchBuffer()  # of what others send
        self._staging = ScratchBuffer()  # of shares that are on a GPU
        self._queue: SimpleQueue[QueuedWork | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="offbeat-exchange", daemon=True)
        self._thread.start()
        atexit.register(self.abandon)

    # --- on the worker's thread

    def reduce_scatter(self, shares: list[Tensor], op: Op) -> QueuedWork:
        return self._start(shares, lambda parts, tag: self._reduce_scatter(parts, op, tag))

    def all_gather(self, shares: list[Tensor]) -> QueuedWork:
        return self._start(shares, self._all_gather)

    def all_to_all(self, away: list[Tensor], into: list[Tensor]) -> QueuedWork:
        return self._start([*away, *into], self._all_to_all)

    def close(self) -> None:
        """Nothing is under way any more: end the thread, and let go of the group."""
        self._queue.put(None)
        self._thread.join()
        self._group = None
        atexit.unregister(self.abandon)

    def abandon(self) -> None:
        """Leave, whatever is under way.

        A thread that waits inside gloo when Python ends would take the process down with it, and nothing but
        time wakes it: a wait that runs out closes all of the group's connections.
        """
        self._queue.put(None)
        self._thread.join(MOMENT_S)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                never = self._group.recv([torch.empty(1)], (self._rank + 1) % self._world, TAGS - 1)
                never.wait(timedelta(milliseconds=1))
            self._thread.join(GRACE_S)
        atexit.unregister(self.abandon)

    def _start(self, shares: list[Tensor], do: Callable[[list[Tensor], int], None]) -> QueuedWork:
        tag = self._started % (TAGS - 1)
        self._started += 1
        if shares[0].is_cuda:
            ready = torch.cuda.current_stream(shares[0].device).record_event()
            queued = QueuedWork(lambda: self._by_way_of_host(shares, ready, lambda copies: do(copies, tag)))
        else:
            queued = QueuedWork(lambda: do(shares, tag))
        self._queue.put(queued)
        return queued

    # --- on the lane's thread

    def _work(self) -> None:
        with torch.no_grad():
            while (queued := self._queue.get()) is not None:
                queued.run()
                del queued  # or it would hold on to the tensors until the next one comes

    def _by_way_of_host(
        self, shares: list[Tensor], ready: torch.cuda.Event, do: Callable[[list[Tensor]], None]
    ) -> None:
        """Gloo's messages leave from the CPU and end there. For trying things out: NCCL is the fast way."""
        sizes = [share.numel() for share in shares]
        parts = self._staging.take(sum(sizes), shares[0].dtype).split(sizes)
        copies = [part.view_as(share) for part, share in zip(parts, shares, strict=True)]
        ready.synchronize()
        torch._foreach_copy_(copies, shares)
        do(copies)
        torch._foreach_copy_(shares, copies)
        torch.cuda.current_stream(shares[0].device).synchronize()

    def _reduce_scatter(self, shares: list[Tensor], op: Op, tag: int) -> None:
        """Sums in the order of ranks: the same bits whoever comes first, and in the virtual world."""
        own = shares[self._rank]
        terms = self._terms(own)
        self._scale(shares[self._after(1)], op)
        for turn in range(1, self._world):
            works = self._turn(turn, shares[self._after(turn)], terms[self._after(-turn)], tag)
            self._scale(shares[self._after(turn + 1)], op)  # what goes next, and last what stays
            _finish(works)
        combine = torch.maximum if op is Op.MAX else torch.add
        total = terms[0]
        for term in terms[1:-1]:
            combine(total, term, out=total)
        combine(total, terms[-1], out=own)

    def _all_gather(self, shares: list[Tensor], tag: int) -> None:
        for turn in range(1, self._world):
            _finish(self._turn(turn, shares[self._rank], shares[self._after(-turn)], tag))

    def _all_to_all(self, both: list[Tensor], tag: int) -> None:
        away, into = both[: self._world], both[self._world :]
        for turn in range(1, self._world):
            _finish(self._turn(turn, away[self._after(turn)], into[self._after(-turn)], tag))

    def _turn(self, turn: int, away: Tensor, into: Tensor, tag: int) -> list[Any]:
        """Start a turn; all that is returned is to be waited for, for as long as the group allows."""
        receive = [self._group.recv([into], self._after(-turn), tag)] if into.numel() else []
        send = [self._group.send([away], self._after(turn), tag)] if away.numel() else []
        return receive + send

    def _after(self, turn: int) -> int:
        return (self._rank + turn) % self._world

    def _scale(self, share: Tensor, op: Op) -> None:
        if op is Op.MEAN:  # before the sum, as `reduce` does
            share.mul_(1 / self._world)

    def _terms(self, own: Tensor) -> list[Tensor]:
        """Everybody's term of this rank's share, by rank: its own, and where the others' will land."""
        others = self._world - 1
        landing = self._landing.take(others * own.numel(), own.dtype).view(others, *own.shape).unbind()
        return [*landing[: self._rank], own, *landing[self._rank :]]


def _finish(works: list[Any]) -> None:
    for work in works:
        work.wait()
