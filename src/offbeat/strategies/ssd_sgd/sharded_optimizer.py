"""Sharded optimizer: each worker owns a slice of the weights and steps it, as in ZeRO-1.

All workers' gradients are reduced to the owners, and the user's own optimizer steps each slice at its owner,
with a state of its own: together the workers hold one copy of the weights and one of the optimizer's state.

If the optimizer is elementwise, slices are equal and cut through parameters: every NIC sends equally much.
For any other optimizer a slice, and each part of it, consists of whole parameters, cut as evenly as possible.
Parts are stepped apart, so that the state of each may lie together in memory (see `parcels.py`).

Where workers may be lost (`port.elastic`) every worker owns everything, a slice of one: a push is then an
all-reduce, and there is nothing to pull.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Block
from offbeat.core.optimizer import LearningRates, OptimizerState
from offbeat.core.partition import WHOLE, EvenSlice
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op, Port
from offbeat.core.replica import Replica
from offbeat.core.slices import Slices, begins_of
from offbeat.strategies.ssd_sgd.cuts import Run, shared_cuts


class ParamShard(NamedTuple):
    """The elements of one parameter that lie in a worker's slice, in the order of memory."""

    param: nn.Parameter
    start: int
    stop: int
    offset: int  # in the slice

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.param.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a worker's flat slice; a whole parameter in its own shape."""
        if self.whole:
            begin = int(flat.storage_offset()) + self.offset
            return flat.as_strided(self.param.shape, self.param.stride(), begin)
        return flat[self.offset : self.offset + self.stop - self.start]

    def state(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return these elements' part of the optimizer's state of the whole parameter."""
        return {k: self._slice(v) if isinstance(v, Tensor) else v for k, v in whole.items()}

    def cut(self, value: Tensor, start: int = 0) -> Tensor:
        """Return these elements of a tensor that has the parameter's from `start` on, as a view."""
        if (self.start, self.stop - self.start) == (start, value.numel()):
            return value
        first = int(value.storage_offset()) + self.start - start
        return value.as_strided((self.stop - self.start,), (1,), first)

    def _slice(self, value: Tensor) -> Tensor:
        if self.whole or value.shape != self.param.shape:
            return value.clone()
        flat = value.new_empty(value.numel())
        flat.as_strided(value.shape, self.param.stride()).copy_(value)
        return flat[self.start : self.stop].clone()


class Partition:
    """Division of the flat weights of one dtype and device: a size and some ParamShards per worker."""

    def __init__(self, flat: Tensor, blocks: list[Block], world: int, evenly: bool, parts: int = 1) -> None:
        self.like = flat
        self.evenly = evenly
        placed = [place for block in blocks for place in block.places()]
        self._params = [param for param, _ in placed]
        places = tuple((begin, param.numel()) for param, begin in placed)
        self._cuts = shared_cuts(places, flat.numel(), flat.element_size(), world, evenly)
        self.sizes = self._cuts.sizes
        self._shards_of: dict[EvenSlice, dict[int, list[ParamShard]]] = {}
        # By worker; those who own no parameter's elements are left out, here and in `shards_of`.
        self.shards = self._shards(self._cuts.runs(parts))
        self.params = {
            worker: list(dict.fromkeys(shard.param for shard in shards))
            for worker, shards in self.shards.items()
        }
        self.marks = max(map(len, self.params.values()), default=0)  # per slice, the same in all

    def zeros(self) -> Tensor:
        """Allocate a flat tensor to `split`: it begins with the flat weights, and padding may follow."""
        return self.like.new_zeros(sum(self.sizes))

    def spans(self, part: EvenSlice) -> list[tuple[int, int]]:
        """Return where this part of each worker's slice begins and ends."""
        return self._cuts.spans(part)

    def sizes_of(self, part: EvenSlice) -> tuple[int, ...]:
        """Return the size of this part of each worker's slice."""
        return self._cuts.sizes_of(part)

    def shards_of(self, part: EvenSlice) -> dict[int, list[ParamShard]]:
        """Return the ParamShards in this part of each worker's slice, with offsets in the part."""
        if part not in self._shards_of:
            self._shards_of[part] = self._shards(self._cuts.runs_of(part))
        return self._shards_of[part]

    def _shards(self, runs_of: dict[int, list[Run]]) -> dict[int, list[ParamShard]]:
        return {
            worker: [ParamShard(self._params[number], *elements) for number, *elements in runs]
            for worker, runs in runs_of.items()
        }

    def split(self, flat: Tensor, part: EvenSlice = WHOLE) -> Slices:
        """Return this part of each worker's slice of `flat`."""
        if part == WHOLE:
            return Slices(self.sizes_of(part), flat)
        apart = [flat[start:stop] for start, stop in self.spans(part) if start < stop]
        return Slices(self.sizes_of(part), *(apart or [flat[:0]]))


class ShardedOptimizer:
    """This worker's slices and their optimizer state, and the buffers that carry gradients to the owners."""

    def __init__(self, replica: Replica, port: Port, parts: int = 1) -> None:
        """Cut slices over the workers of `port`, and each slice into `parts` that are stepped apart."""
        self.replica = replica
        self.parts = [EvenSlice(number, parts) for number in range(parts)]
        self.elastic = port.elastic
        self.rank, world = (0, 1) if self.elastic else (port.rank, port.world)
        evenly = replica.optimizer.elementwise
        kinds = zip(replica.weights, replica.flat_groups().values(), strict=True)
        self.partitions = [Partition(flat, blocks, world, evenly, parts) for flat, blocks in kinds]
        self.shards = [shard for each in self.partitions for shard in each.shards.get(self.rank, ())]
        # By worker: its slice of the gradients, then a mark per parameter, 1 if any worker has its gradient.
        self._send_buffers = [_with_marks(partition) for partition in self.partitions]
        self._own_grads = [buffers[self.rank] for buffers in self._send_buffers]
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._marks: dict[nn.Parameter, list[Tensor]] = {}  # of this worker, by parameter
        self._grad_views = [pair for b in replica.blocks for pair in zip(b.params, b.grad_views, strict=True)]
        for partition, blocks, buffers in zip(
            self.partitions, replica.flat_groups().values(), self._send_buffers, strict=True
        ):
            self._plan_copies(partition, blocks, buffers)
        self.own: list[Tensor] = []  # this worker's slices
        self._by_group: list[list[Tensor]] = []
        self._state: OptimizerState = defaultdict(dict)
        self._owned: dict[nn.Parameter, dict[int, Tensor]] = {}  # of each, what is stepped here, by its start

    def _plan_copies(self, partition: Partition, blocks: list[Block], buffers: Slices) -> None:
        """Find the copies that fill the send buffers: from views of the gradients to views of the buffers."""
        begins = begins_of(partition.sizes)
        for worker, params in partition.params.items():
            start, size, buffer = begins[worker], partition.sizes[worker], buffers[worker]
            for block in blocks:
                begin = int(block.weight.storage_offset())
                first, last = max(begin, start), min(begin + block.numel, start + size)
                if first < last:
                    self._sources.append(block.grad[first - begin : last - begin])
                    self._targets.append(buffer[first - start : last - start])
            marks = partition.like.new_ones(partition.marks)
            self._sources.append(marks)
            self._targets.append(buffer[size:])
            for param, mark in zip(params, marks, strict=False):
                self._marks.setdefault(param, []).append(mark)

    # --- this worker's slices

    def copy_out(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Copy this worker's slices of the replica's weights, and its optimizer's state by ParamShard."""
        own = []
        for partition, weight in zip(self.partitions, self.replica.weights, strict=True):
            start, stop = partition.spans(WHOLE)[self.rank]
            flat = weight.new_zeros(stop - start)
            part = weight[start:stop]  # the last slice may reach beyond the weights
            flat[: part.numel()].copy_(part)
            own.append(flat)
        return own, [shard.state(self.replica.optimizer.state_of(shard.param)) for shard in self.shards]

    def bind(self, own: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Step these slices from now on, with these states: those of `copy_out`, or of a checkpoint."""
        self.own = own
        self._owned = {}
        remaining = iter(states)
        for partition, flat, grads in zip(self.partitions, own, self._own_grads, strict=True):
            for shard in partition.shards.get(self.rank, ()):
                tensor = shard.of(flat)
                self._owned.setdefault(shard.param, {})[shard.start] = tensor
                tensor.grad = shard.of(grads)
                self._state[tensor] = next(remaining)
        self._by_group = [
            [tensor for param in group["params"] for tensor in self._owned.get(param, {}).values()]
            for group in self.replica.optimizer.groups
        ]

    def step(self, means: list[Tensor], rates: LearningRates, has_missing: bool) -> None:
        """Let the user's optimizer step this worker's slices with the mean gradients.

        A parameter for which no worker has a gradient is not stepped. Only the marks show which, and reading
        them stalls a GPU: they are read only if `has_missing`, that is if this worker lacked a gradient.
        """
        for mean, own in zip(means, self._own_grads, strict=True):
            if mean.data_ptr() != own.data_ptr():  # only where the mean comes from a checkpoint
                own.copy_(mean)
        idle = self._idle() if has_missing else []
        grads = [tensor.grad for tensor in idle]
        for tensor in idle:
            tensor.grad = None
        self.replica.optimizer.step_tensors(self._by_group, rates, self._state)
        for tensor, grad in zip(idle, grads, strict=True):
            tensor.grad = grad

    def _idle(self) -> list[Tensor]:
        """Return the tensors for which no worker has a gradient."""
        idle: list[Tensor] = []
        for partition, grads in zip(self.partitions, self._own_grads, strict=True):
            marks = grads[partition.sizes[self.rank] :].tolist()
            for param, mark in zip(partition.params.get(self.rank, ()), marks, strict=False):
                idle += [] if mark else self._owned[param].values()
        return idle

    def owned(self, shard: ParamShard) -> tuple[Tensor, dict[str, Any]]:
        """Return a shard of a part of this worker's slice, as it is stepped here, with its state."""
        tensor = self._owned[shard.param][shard.start]
        return tensor, self._state[tensor]

    # --- exchange

    def push(self, port: Port, skipped: bool) -> tuple[list[Pending[Tensor]], list[nn.Parameter]]:
        """Send a copy of the gradients to their owners; return also the parameters without one here.

        A worker that skips this step sends zeros, and has no gradient at all.
        """
        missing = list(self._marks) if skipped else self._collect_gradients()
        if skipped:
            torch._foreach_zero_(self._targets)
        else:
            marks = [mark for param in missing for mark in self._marks.get(param, ())]
            for mark in marks:
                mark.zero_()
            torch._foreach_copy_(self._targets, self._sources)
            for mark in marks:
                mark.fill_(1)
        if self.elastic:
            return [port.all_reduce(grads, Op.MEAN, Lane.BACK) for grads in self._own_grads], missing
        return [port.reduce_scatter(each, Op.MEAN, Lane.BACK) for each in self._send_buffers], missing

    def _collect_gradients(self) -> list[nn.Parameter]:
        """Copy gradients that the loop has replaced into their blocks; return the parameters without one."""
        missing = []
        for param, view in self._grad_views:
            if param.grad is None:
                view.zero_()
                missing.append(param)
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
        return missing

    def pull(
        self, port: Port, into: list[Tensor], lane: Lane = Lane.BACK, part: EvenSlice = WHOLE
    ) -> list[Pending[Slices]]:
        """Gather this part of all workers' slices, as they are now."""
        pulls: list[Pending[Slices]] = []
        for partition, own, flat in zip(self.partitions, self.own, into, strict=True):
            slices = partition.split(flat, part)
            start, stop = partition.spans(part)[self.rank]
            begin = partition.spans(WHOLE)[self.rank][0]
            slices[self.rank].copy_(own[start - begin : stop - begin])
            alone = self.elastic or not any(slices.sizes)
            pulls.append(Arrived(slices) if alone else port.all_gather(slices, lane))
        return pulls

    def load_pulled(self, pulled: list[Tensor]) -> None:
        """Copy pulled weights to the replica."""
        for weight, flat in zip(self.replica.weights, pulled, strict=True):
            weight.copy_(flat[: weight.numel()])

    def load_own(self) -> None:
        """Copy this worker's own slices to the replica's weights."""
        for partition, weight, own in zip(self.partitions, self.replica.weights, self.own, strict=True):
            start, stop = partition.spans(WHOLE)[self.rank]
            target = weight[start:stop]  # the last slice may reach beyond the weights
            target.copy_(own[: target.numel()])


def _with_marks(partition: Partition) -> Slices:
    sizes = tuple(size + partition.marks for size in partition.sizes)
    return Slices(sizes, partition.like.new_zeros(sum(sizes)))
