"""Parcels: a part of the global weights and of the optimizer's state, as it travels to a worker.

Each owner sends two parcels: its slice of the weights as it lies in memory, and the state of every piece of a
parameter in the part:

    momentum │ … │ momentum │ …  …  │ numbers of all pieces, after a mark each: 1 if the piece has a state yet
    ── piece 0 ── ── piece 1 ──

Every tensor begins at a multiple of 64 bytes. An optimizer without state sends the weights alone. If slices
are even, all parcels of a part are as long as the longest. Nothing is copied to be sent: an owner's state
lives in its own parcels, and its optimizer steps it there.

A server has one parcel for all: its weights, and each name of its optimizer's state laid out as the weights
are, numbers too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.partition import ALIGNMENT_BYTES, WHOLE, EvenSlice, grain_of
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.core.slices import Slices, begins_of
from offbeat.server.optimizer_spec import spec_of
from offbeat.strategies.ssd_sgd.sharded_optimizer import ParamShard, ShardedOptimizer
from offbeat.strategies.ssd_sgd.state_form import StateForm, as_laid_out, form_of

_NUMBER = torch.float64


@dataclass
class ParcelState:
    """Memory of the parcels in flight; a part of SSD-SGD's state."""

    parcels: list[Tensor] = field(default_factory=list)  # by dtype and device; of a server: and state
    kept: list[Tensor] = field(default_factory=list)  # the latest local gradient, of the part in flight


class Piece(NamedTuple):
    """A piece of a parameter, as a parcel has brought it."""

    shard: ParamShard
    form: StateForm
    weight: Tensor
    state: dict[str, Tensor]
    numbers: list[Tensor]
    marks: list[Tensor]  # if all are 0, the piece has no state yet
    grad: Tensor  # the local gradient of the step that the parcel lacks; empty for this worker's own pieces


class Parcels(ABC):
    """Source of parcels."""

    def __init__(self, replica: Replica) -> None:
        params = [p for blocks in replica.flat_groups().values() for block in blocks for p in block.params]
        self.numbers = {param: number for number, param in enumerate(params)}
        self.forms = {param: form_of(replica.optimizer, param) for param in params}

    @abstractmethod
    def keep(self, part: EvenSlice) -> None:
        """Keep the local gradient of a part whose pull is about to be sent; backward will overwrite it."""

    @abstractmethod
    def pull(self, port: Port, part: EvenSlice, clock: int | None) -> list[Pending[Any]]:
        """Start to pull a part, as its owners have it now."""

    @abstractmethod
    def arrived(self, part: EvenSlice) -> list[Piece]:
        """Return the pieces of a part that others own."""

    @abstractmethod
    def own(self, part: EvenSlice) -> Iterator[tuple[ParamShard, Tensor, dict[str, Any], int]]:
        """Yield this worker's own pieces of a part: what it steps of the parameter, its state, the first."""


class _Layout:
    """The layout of one part in memory: views for sending and receiving."""

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []  # by kind: all numbers of this worker's own parcel
        self.own: list[list[Piece]] = []  # by kind
        self.others: list[Piece] = []
        self.kept_sources: list[Tensor] = []
        self.gathered: list[Slices] = []  # by kind, what has any entries: all weights, then all states


class ShardedParcels(Parcels):
    """Parcels of all owners, gathered by all."""

    def __init__(self, state: ParcelState, replica: Replica, owner: ShardedOptimizer) -> None:
        super().__init__(replica)
        self._owner = owner
        self._alone = all(len(partition.sizes) == 1 for partition in owner.partitions)
        if self._alone:  # this worker owns everything
            return
        if not state.parcels:
            for kind, partition in enumerate(owner.partitions):
                sizes = [self._received(kind, part) for part in owner.parts]
                nbytes, kept = (max(each) for each in zip(*sizes, strict=True))
                state.parcels.append(partition.like.new_zeros(nbytes, dtype=torch.uint8))
                state.kept.append(partition.like.new_zeros(kept))
        grads = {
            param: view
            for block in replica.blocks
            for param, view in zip(block.params, block.grad_views, strict=True)
        }
        self._layouts = {part: self._lay_out(state, part, grads) for part in owner.parts}
        for layout in self._layouts.values():
            self._pack(layout)

    def _state_bytes(self, kind: int, part: EvenSlice) -> tuple[int, ...]:
        """Return the bytes of each worker's parcel of state."""
        partition = self._owner.partitions[kind]
        nbytes_of = [0] * len(partition.sizes)
        for worker, shards in partition.shards_of(part).items():
            numbers, nbytes = 0, 0
            for shard in shards:
                form = self.forms[shard.param]
                for each in form.tensors.values():
                    count = shard.stop - shard.start if each.cut else each.shape.numel()
                    nbytes += _aligned(count * each.dtype.itemsize)
                numbers += _numbers_of(form)
            nbytes_of[worker] = nbytes + _aligned(numbers * _NUMBER.itemsize)
        if partition.evenly:  # equal slices are gathered fastest, and all workers send equally much
            nbytes_of = [max(nbytes_of)] * len(nbytes_of)
        return tuple(nbytes_of)

    def _received(self, kind: int, part: EvenSlice) -> tuple[int, int]:
        """Return how many bytes others send of a part, and how many gradients of theirs are kept."""
        partition, rank = self._owner.partitions[kind], self._owner.rank
        itemsize = partition.like.element_size()
        nbytes = _aligned(_of_others(partition.sizes_of(part), rank) * itemsize)
        nbytes += _of_others(self._state_bytes(kind, part), rank)
        shards = [s for worker, each in partition.shards_of(part).items() if worker != rank for s in each]
        return nbytes, sum(_aligned(shard.stop - shard.start, grain_of(itemsize)) for shard in shards)

    def _lay_out(self, state: ParcelState, part: EvenSlice, grads: dict[nn.Parameter, Tensor]) -> _Layout:
        layout, rank = _Layout(), self._owner.rank
        states: list[Slices] = []
        for kind, partition in enumerate(self._owner.partitions):
            dtype, received, kept = partition.like.dtype, state.parcels[kind], state.kept[kind]
            sizes, nbytes_of = partition.sizes_of(part), self._state_bytes(kind, part)
            begin, (start, stop) = partition.spans(WHOLE)[rank][0], partition.spans(part)[rank]
            own = self._owner.own[kind][start - begin : stop - begin]
            own_state = partition.like.new_zeros(nbytes_of[rank], dtype=torch.uint8)
            length = _of_others(sizes, rank) * dtype.itemsize
            weights = _around(own, received[:length].view(dtype), sizes, rank)
            parcels = _around(own_state, received[_aligned(length) :], nbytes_of, rank)
            layout.gathered += [weights] if any(sizes) else []
            states += [parcels] if any(nbytes_of) else []
            shards_of = partition.shards_of(part)
            pieces, numbers = self._pieces(shards_of.get(rank, []), own, own_state)
            layout.own.append(pieces)
            layout.numbers.append(numbers)
            for worker, shards in shards_of.items():
                if worker == rank:
                    continue
                pieces, _ = self._pieces(shards, weights[worker], parcels[worker])
                for piece in pieces:
                    numel = piece.weight.numel()
                    grad, kept = kept[:numel], kept[_aligned(numel, grain_of(dtype.itemsize)) :]
                    layout.others.append(piece._replace(grad=_shaped(grad, piece.shard)))
                    layout.kept_sources.append(piece.shard.cut(grads[piece.shard.param]))
        layout.gathered += states
        return layout

    def _pieces(
        self, shards: list[ParamShard], weights: Tensor, parcel: Tensor
    ) -> tuple[list[Piece], Tensor]:
        """Return the pieces of one worker in its two parcels, and all their numbers."""
        pieces, at = [], 0
        count = sum(_numbers_of(self.forms[shard.param]) for shard in shards)
        numbers = parcel[parcel.numel() - _aligned(count * _NUMBER.itemsize) :].view(_NUMBER)[:count]
        rest = numbers
        for shard in shards:
            form = self.forms[shard.param]
            tensors = {}
            for name, each in form.tensors.items():
                tensors[name] = _view(parcel, at, shard if each.cut else each.shape, each.dtype)
                at += _aligned(tensors[name].nbytes)
            used, rest = rest[: _numbers_of(form)], rest[_numbers_of(form) :]
            no_grad = weights.new_empty(0)
            pieces.append(
                Piece(shard, form, shard.of(weights), tensors, list(used[1:]), list(used[:1]), no_grad)
            )
        return pieces, numbers

    def keep(self, part: EvenSlice) -> None:
        if not self._alone and self._layouts[part].others:
            layout = self._layouts[part]
            torch._foreach_copy_([piece.grad for piece in layout.others], layout.kept_sources)

    def pull(self, port: Port, part: EvenSlice, clock: int | None) -> list[Pending[Any]]:
        if self._alone:
            return []
        layout = self._layouts[part]
        self._pack(layout)
        return [port.all_gather(slices, Lane.BACK) for slices in layout.gathered]

    def _pack(self, layout: _Layout) -> None:
        """Let the state of this worker's own pieces live in the parcels; write their numbers."""
        targets, sources = [], []
        for pieces, numbers in zip(layout.own, layout.numbers, strict=True):
            values: list[Any] = []
            for piece in pieces:
                form = piece.form
                tensor, state = self._owner.owned(piece.shard)
                if state:
                    form.check(state)
                for name, home in piece.state.items() if state else ():
                    value = as_laid_out(state, name, tensor)
                    if value.device != home.device or value.data_ptr() != home.data_ptr():
                        targets.append(home)
                        sources.append(value)
                    if value.device == home.device:
                        state[name] = home
                if piece.marks:
                    found = [state[name] for name in form.numbers] if state else [0.0] * len(form.numbers)
                    values += [float(bool(state)), *found]
            if values:
                _write_numbers(numbers, values)
        if targets:
            torch._foreach_copy_(targets, sources)

    def arrived(self, part: EvenSlice) -> list[Piece]:
        return [] if self._alone else self._layouts[part].others

    def own(self, part: EvenSlice) -> Iterator[tuple[ParamShard, Tensor, dict[str, Any], int]]:
        for partition in self._owner.partitions:
            for shard in partition.shards_of(part).get(self._owner.rank, ()):
                yield shard, *self._owner.owned(shard), shard.start


class ServerParcels(Parcels):
    """The one parcel of a server. It is pulled whole, and the pushed gradient is the one to keep."""

    def __init__(self, state: ParcelState, replica: Replica, pushed: list[Tensor]) -> None:
        super().__init__(replica)
        self._kinds = len(replica.weights)
        names = list(spec_of(replica).state_names())
        if not state.parcels:
            state.parcels = [torch.zeros_like(w) for _ in range(1 + len(names)) for w in replica.weights]
        self._parcels = state.parcels
        self._pieces = []
        for kind, (flat, blocks) in enumerate(zip(pushed, replica.flat_groups().values(), strict=True)):
            for block in blocks:
                start = int(block.weight.storage_offset())
                grads = block.views(flat[start:])
                brought = [block.views(each[start:]) for each in self._parcels[kind :: self._kinds]]
                for param, grad, weight, *parts in zip(block.params, grads, *brought, strict=True):
                    if param.numel():
                        named = dict(zip(names, parts, strict=True))
                        self._pieces.append(self._piece(param, grad, weight, named))

    def _piece(self, param: nn.Parameter, grad: Tensor, weight: Tensor, parts: dict[str, Tensor]) -> Piece:
        form = self.forms[param]
        tensors = {name: parts[name] for name in form.tensors}
        first = (0,) * param.dim()
        numbers = [parts[name][first] for name in form.numbers]
        marks = [*tensors.values(), *numbers]
        return Piece(ParamShard(param, 0, param.numel(), 0), form, weight, tensors, numbers, marks, grad)

    def keep(self, part: EvenSlice) -> None:
        """Do nothing: a push to a server leaves its gradient as it is."""

    def pull(self, port: Port, part: EvenSlice, clock: int | None) -> list[Pending[Any]]:
        assert part == WHOLE, "a server answers a pull with all of its weights"
        weights, rest = self._parcels[: self._kinds], self._parcels[self._kinds :]
        pulls: list[Pending[Any]] = [port.server.pull(weights, clock)]
        for number in range(len(rest) // self._kinds):
            into = rest[number * self._kinds : (number + 1) * self._kinds]
            pulls.append(port.server.pull_state(number + 1, into))
        return pulls

    def arrived(self, part: EvenSlice) -> list[Piece]:
        return self._pieces

    def own(self, part: EvenSlice) -> Iterator[tuple[ParamShard, Tensor, dict[str, Any], int]]:
        return iter(())


def _of_others(sizes: tuple[int, ...], rank: int) -> int:
    return sum(sizes) - sizes[rank]


def _around(own: Tensor, others: Tensor, sizes: tuple[int, ...], rank: int) -> Slices:
    """Return the slices of all workers: this one's in memory of its own, those of others in theirs."""
    before = begins_of(sizes)[rank]
    return Slices(sizes, others[:before], own, others[before : _of_others(sizes, rank)])


def _aligned(count: int, grain: int = ALIGNMENT_BYTES) -> int:
    return -(-count // grain) * grain


def _numbers_of(form: StateForm) -> int:
    """Return how many numbers travel with a piece: a mark and its numbers, where it has any state."""
    return 1 + len(form.numbers) if form.tensors or form.numbers else 0


def _view(parcel: Tensor, at: int, like: ParamShard | torch.Size, dtype: torch.dtype) -> Tensor:
    numel = like.stop - like.start if isinstance(like, ParamShard) else like.numel()
    flat = parcel[at : at + numel * dtype.itemsize].view(dtype)
    return _shaped(flat, like) if isinstance(like, ParamShard) else flat.view(like)


def _shaped(flat: Tensor, shard: ParamShard) -> Tensor:
    """Return a flat tensor in the shape and memory format of a whole parameter; of a piece as it is."""
    if not shard.whole:
        return flat
    return flat.as_strided(shard.param.shape, shard.param.stride(), int(flat.storage_offset()))


def _write_numbers(into: Tensor, values: list[Any]) -> None:
    """Write numbers, without waiting for those that lie on a GPU."""
    on_device = [isinstance(value, Tensor) and value.device.type != "cpu" for value in values]
    host = [0.0 if away else float(value) for value, away in zip(values, on_device, strict=True)]
    into.copy_(torch.tensor(host, dtype=_NUMBER))
    for target, value, away in zip(into, values, on_device, strict=True):
        if away:
            target.copy_(value)
