"""Sums: what a parameter server adds up for workers that hold the weights themselves.

The terms of one sum come in any order and are added in the order of workers. A sum is made once all who take
part have brought theirs; who dies takes no part any more. Nobody can come later: the server does not have the
weights that such a one would need.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.core.port import Op
from offbeat.server.messages import Reduce, ReduceReply


class ServerReduce:
    def __init__(self) -> None:
        self.of: set[int] = set()  # the workers who take part
        self.made = 0  # the number of the latest
        self._terms: dict[int, dict[int, Reduce]] = {}  # by number and worker

    def join(self, worker: int, new: bool) -> None:
        if not new or not self.made:
            self.of.add(worker)

    def leave(self, worker: int) -> None:
        self.of.discard(worker)

    def expects(self, worker: int, number: int) -> bool:
        """Whether this term is still wanted."""
        return worker in self.of and number > self.made

    def add(self, term: Reduce) -> None:
        if self.expects(term.worker, term.number):
            self._terms.setdefault(term.number, {})[term.worker] = term

    def totals(self) -> list[ReduceReply]:
        """Of all sums that can be made now."""
        totals: list[ReduceReply] = []
        while (terms := self._terms.get(self.made + 1)) and terms.keys() >= self.of:
            self.made += 1
            total = ordered_sum([terms[worker] for worker in sorted(terms)])
            totals += [
                ReduceReply(worker=w, number=self.made, tensor=total) for w in sorted(terms) if w in self.of
            ]
            del self._terms[self.made]
        return totals

    def restart(self) -> None:
        self.made = 0
        self._terms.clear()


def ordered_sum(terms: list[Reduce]) -> Tensor:
    total = terms[0].tensor
    for term in terms:
        if term.op is Op.MEAN:  # before the sum, as in a reduction among workers
            term.tensor.mul_(1 / len(terms))
        if term is not terms[0]:
            combine = torch.maximum if term.op is Op.MAX else torch.add
            combine(total, term.tensor, out=total)
    return total
