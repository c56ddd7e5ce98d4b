"""Owned: the weights cut into one share a worker, and the share that this worker owns.

Everybody's gradients travel to the owners, and the user's own optimizer steps each share where it lies, with
a state of its own: together the workers keep one copy of the weights and one of the optimizer's state.

Where the optimizer steps every element by itself, shares are even slices, cut through parameters: every NIC
carries the same. For any other optimizer a share is of whole parameters, cut where that is most nearly even.

    flat weights     │ parameter a │ parameter b          │ c │ parameter d │   as the replica lays them out
    even shares      │ share 0           │ share 1           │ share 2 ····│   of one size, the last padded
    whole ones       │ share 0     │ share 1              │ share 2         │
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.blocks import ALIGNMENT_BYTES, WHOLE, Block, EvenSlice
from offbeat.core.optimizer import LearningRates, OptimizerState
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op, Port
from offbeat.core.replica import Replica


class ParamShard(NamedTuple):
    """What a share holds of one parameter: some of its elements, in the order in which they lie in memory."""

    param: nn.Parameter
    start: int
    stop: int
    at: int  # where in the share it lies

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.param.numel()

    def of(self, share: Tensor) -> Tensor:
        """This piece of a flat share; a whole parameter in its own shape."""
        if self.whole:
            begin = int(share.storage_offset()) + self.at
            return share.as_strided(self.param.shape, self.param.stride(), begin)
        return share[self.at : self.at + self.stop - self.start]

    def state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This piece's part of the optimizer's state of the whole parameter."""
        return {k: self._part(v) if isinstance(v, Tensor) else v for k, v in whole.items()}

    def _part(self, value: Tensor) -> Tensor:
        if self.whole or value.shape != self.param.shape:
            return value.clone()
        flat = value.new_empty(value.numel())
        flat.as_strided(value.shape, self.param.stride()).copy_(value)
        return flat[self.start : self.stop].clone()


class Partition:
    """How the flat weights of one dtype and device are cut: a size and some pieces for each worker."""

    def __init__(self, flat: Tensor, blocks: list[Block], world: int, evenly: bool) -> None:
        self.like = flat
        places = [place for block in blocks for place in block.places()]
        if evenly:
            align = ALIGNMENT_BYTES // flat.element_size()
            self.sizes = [-(-flat.numel() // (align * world)) * align] * world
        else:
            self.sizes = between([place for _, place in places] + [flat.numel()], world)
        self.pieces = [list(_pieces(places, start, stop)) for start, stop in self.spans(WHOLE)]
        self.marks = max(len(pieces) for pieces in self.pieces)  # as many in each share: they travel alike

    def zeros(self) -> Tensor:
        """A flat tensor that can be `split`, a little longer than the flat weights, which begin it."""
        return self.like.new_zeros(sum(self.sizes))

    def spans(self, part: EvenSlice) -> list[tuple[int, int]]:
        """Where this part of each share begins and ends."""
        spans = [part.span(size, self.like.element_size()) for size in self.sizes]
        begins = accumulate(self.sizes, initial=0)
        return [(begin + start, begin + stop) for begin, (start, stop) in zip(begins, spans, strict=False)]

    def split(self, flat: Tensor, part: EvenSlice = WHOLE) -> list[Tensor]:
        return [flat[start:stop] for start, stop in self.spans(part)]


def between(edges: list[int], world: int) -> list[int]:
    """Sizes of shares that begin and end at edges, the nearest to an even cut."""

    def nearest(place: float) -> int:
        right = bisect(edges, place, hi=len(edges) - 1)
        return min(edges[max(0, right - 1)], edges[right], key=lambda edge: abs(edge - place))

    cuts = [nearest(edges[-1] * k / world) for k in range(world + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


def _pieces(places: list[tuple[nn.Parameter, int]], start: int, stop: int) -> Iterator[ParamShard]:
    for param, place in places:
        first, last = max(place, start), min(place + param.numel(), stop)
        if first < last:
            yield ParamShard(param, first - place, last - place, first - start)


class ShardedOptimizer:
    """This worker's share, and the buffers in which everybody's gradients travel to their owners."""

    def __init__(self, replica: Replica, rank: int, world: int) -> None:
        self.replica = replica
        self.rank = rank
        evenly = replica.optimizer.elementwise
        kinds = zip(replica.weights, replica.flat_groups().values(), strict=True)
        self.shares = [Partition(flat, blocks, world, evenly) for flat, blocks in kinds]
        self.pieces = [piece for shares in self.shares for piece in shares.pieces[rank]]
        # Each share of the gradients is followed by one mark a piece: whether anybody has a gradient for it.
        self._travelling = [[s.like.new_zeros(n + s.marks) for n in s.sizes] for s in self.shares]
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._marks: dict[nn.Parameter, list[Tensor]] = {}  # of this worker, for each piece of a parameter
        self._homes = [home for b in replica.blocks for home in zip(b.params, b.grad_views, strict=True)]
        for shares, blocks, travelling in zip(
            self.shares, replica.flat_groups().values(), self._travelling, strict=True
        ):
            self._lay_ways(shares, blocks, travelling)
        self._own: list[Tensor] = []
        self._by_group: list[list[Tensor]] = []
        self._state: OptimizerState = defaultdict(dict)

    def _lay_ways(self, shares: Partition, blocks: list[Block], travelling: list[Tensor]) -> None:
        """Where each stretch of the gradients goes when it sets out."""
        start = 0
        for size, pieces, travel in zip(shares.sizes, shares.pieces, travelling, strict=True):
            for block in blocks:
                begin = int(block.weight.storage_offset())
                first, last = max(begin, start), min(begin + block.numel, start + size)
                if first < last:
                    self._sources.append(block.grad[first - begin : last - begin])
                    self._targets.append(travel[first - start : last - start])
            marks = shares.like.new_ones(shares.marks)
            self._sources.append(marks)
            self._targets.append(travel[size:])
            for piece, mark in zip(pieces, marks, strict=False):
                self._marks.setdefault(piece.param, []).append(mark)
            start += size

    # --- the share itself

    def copy_out(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """This worker's share of the replica's weights, and of its optimizer's state, by piece."""
        own = []
        for shares, weight in zip(self.shares, self.replica.weights, strict=True):
            flat = shares.zeros()
            flat[: weight.numel()].copy_(weight)
            own.append(shares.split(flat)[self.rank].clone())
        return own, [piece.state(self.replica.optimizer.state_of(piece.param)) for piece in self.pieces]

    def hold(self, own: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Step these tensors from now on, with these states: what `copy_out` gave, once or long ago."""
        self._own = own
        tensors: dict[nn.Parameter, Tensor] = {}
        remaining = iter(states)
        for shares, share, travelling in zip(self.shares, own, self._travelling, strict=True):
            for piece in shares.pieces[self.rank]:
                tensor = tensors[piece.param] = piece.of(share)
                tensor.grad = piece.of(travelling[self.rank])
                self._state[tensor] = next(remaining)
        self._by_group = [
            [tensors[param] for param in group["params"] if param in tensors]
            for group in self.replica.optimizer.groups
        ]

    def step(self, sums: list[Tensor], rates: LearningRates, doubtful: bool) -> None:
        """Let the user's optimizer step this share with what has come for it.

        A piece for which nobody has a gradient is left alone. Doubtful: this worker had none for some, so
        that only the marks tell; reading them would stall a GPU, and is not done for nothing.
        """
        for share, travelling in zip(sums, self._travelling, strict=True):
            travelling[self.rank].copy_(share)  # it is the very same, unless it comes from a checkpoint
        idle = self._idle() if doubtful else []
        grads = [tensor.grad for tensor in idle]
        for tensor in idle:
            tensor.grad = None
        self.replica.optimizer.step_tensors(self._by_group, rates, self._state)
        for tensor, grad in zip(idle, grads, strict=True):
            tensor.grad = grad

    def _idle(self) -> list[Tensor]:
        found = []
        for shares, travelling in zip(self.shares, self._travelling, strict=True):
            size, pieces = shares.sizes[self.rank], shares.pieces[self.rank]
            found += travelling[self.rank][size : size + len(pieces)].tolist()
        return [tensor for tensor, mark in zip(self._state, found, strict=True) if not mark]

    # --- what travels

    def push(self, port: Port, skipped: bool) -> tuple[list[Pending[Tensor]], bool]:
        """Send a copy of the gradients to their owners, and say whether any is missing here.

        A worker that skips this step sends zeros, and has no gradient for anything.
        """
        missing = [] if skipped else self._settle()
        if skipped:
            torch._foreach_zero_(self._targets)
        else:
            marks = [mark for param in missing for mark in self._marks.get(param, ())]
            for mark in marks:
                mark.zero_()
            torch._foreach_copy_(self._targets, self._sources)
            for mark in marks:
                mark.fill_(1)
        pushes = [port.reduce_scatter(travelling, Op.MEAN, Lane.BACK) for travelling in self._travelling]
        return pushes, skipped or bool(missing)

    def _settle(self) -> list[nn.Parameter]:
        """Bring gradients home that the loop has put elsewhere; the parameters that have none."""
        missing = []
        for param, home in self._homes:
            if param.grad is None:
                home.zero_()
                missing.append(param)
            elif param.grad.data_ptr() != home.data_ptr():
                home.copy_(param.grad)
        return missing

    def pull(
        self, port: Port, into: list[Tensor], lane: Lane = Lane.BACK, part: EvenSlice = WHOLE
    ) -> list[Pending[list[Tensor]]]:
        """Bring this part of all owners' shares here, as they are now."""
        pulls: list[Pending[list[Tensor]]] = []
        for shares, own, flat in zip(self.shares, self._own, into, strict=True):
            slices = shares.split(flat, part)
            slices[self.rank].copy_(part.of(own))
            something = any(each.numel() for each in slices)  # else not worth a trip
            pulls.append(port.all_gather(slices, lane) if something else Arrived(slices))
        return pulls

    def adopt(self, pulled: list[Tensor]) -> None:
        """Make the replica's weights what was pulled."""
        for weight, flat in zip(self.replica.weights, pulled, strict=True):
            weight.copy_(flat[: weight.numel()])

    def adopt_own(self, part: EvenSlice = WHOLE) -> None:
        """Make this part of this worker's own share, in the replica's weights, what it is by now."""
        for shares, weight, own in zip(self.shares, self.replica.weights, self._own, strict=True):
            start, stop = shares.spans(part)[self.rank]
            held = weight[start:stop]  # the last share is longer than the weights
            held.copy_(part.of(own)[: held.numel()])
