"""Reductions by a parameter server, for workers that hold the weights themselves.

Tensors of one reduction arrive in any order and are added in the order of workers. A reduction is complete
once all participants have sent their tensors; a worker that leaves is no longer a participant. A new worker
cannot join after the first reduction: the server does not have the weights that such a worker would need.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offbeat.core.port import Op
from offbeat.server.messages import Reduce, ReduceReply


class ServerReduce:
    """Reductions in progress on one shard."""

    def __init__(self) -> None:
        self.participants: set[int] = set()
        self.completed = 0  # number of the latest complete reduction
        self._messages: dict[int, dict[int, Reduce]] = {}  # by number and worker

    def join(self, worker: int, new: bool) -> None:
        if not new or not self.completed:
            self.participants.add(worker)

    def leave(self, worker: int) -> None:
        self.participants.discard(worker)

    def expects(self, worker: int, number: int) -> bool:
        """Return whether a tensor of this worker for this reduction is still needed."""
        return worker in self.participants and number > self.completed

    def add(self, message: Reduce) -> None:
        if self.expects(message.worker, message.number):
            self._messages.setdefault(message.number, {})[message.worker] = message

    def replies(self) -> list[ReduceReply]:
        """Return the results of all reductions that can be completed now."""
        replies: list[ReduceReply] = []
        while (sent := self._messages.get(self.completed + 1)) and sent.keys() >= self.participants:
            self.completed += 1
            workers = sorted(sent)
            total = ordered_sum([sent[worker].tensor for worker in workers], sent[workers[0]].op, len(sent))
            replies += [
                ReduceReply(worker=worker, number=self.completed, tensor=total)
                for worker in workers
                if worker in self.participants
            ]
            del self._messages[self.completed]
        return replies

    def restart(self) -> None:
        self.completed = 0
        self._messages.clear()


def ordered_sum(terms: Iterable[Tensor], op: Op, count: int) -> Tensor:
    """Reduce `count` tensors in their order, into the first; a mean divides each tensor, in place."""
    combine = torch.maximum if op is Op.MAX else torch.add
    total: Tensor | None = None
    for term in terms:
        if op is Op.MEAN:  # before the sum, as in a reduction among workers
            term.mul_(1 / count)
        total = term if total is None else combine(total, term, out=total)
    assert total is not None
    return total
