"""Parcels: a part of the global weights and of the optimizer's state, as it travels to a worker.

Each owner's parcel has, for every piece of a parameter in the part:

    weights │ momentum │ … │ weights │ momentum │ …  …  │ numbers of all pieces, after a mark each: 1 if the
    ─────── piece 0 ────── ─────── piece 1 ───────                         piece has a state yet

Every tensor begins at a multiple of 64 bytes. An optimizer without state sends the weights alone. If slices
are even, all parcels of a part are as long as the longest.

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
    """The layout of one part in memory: views for packing and unpacking."""

    def __init__(self) -> None:
        self.slices: list[list[Tensor]] = []  # by kind, by worker
        self.number_views: list[Tensor] = []  # by kind: all numbers of this worker's own parcel
        self.own: list[list[Piece]] = []  # by kind
        self.others: list[Piece] = []
        self.kept_sources: list[Tensor] = []


class ShardedParcels(Parcels):
    """Parcels of all owners, gathered by all."""

    def __init__(self, state: ParcelState, replica: Replica, owner: ShardedOptimizer, parts: int) -> None:
        super().__init__(replica)
        self._owner = owner
        self._parts = [EvenSlice(number, parts) for number in range(parts)]
        self._alone = all(len(partition.sizes) == 1 for partition in owner.partitions)
        if self._alone:  # this worker owns everything
            return
        if not state.parcels:
            for kind, partition in enumerate(owner.partitions):
                sizes = [self._sizes(kind, part) for part in self._parts]
                nbytes = max(sum(parcels) for parcels, _ in sizes)
                state.parcels.append(partition.like.new_zeros(nbytes, dtype=torch.uint8))
                state.kept.append(partition.like.new_zeros(max(kept for _, kept in sizes)))
        grads = {
            param: view
            for block in replica.blocks
            for param, view in zip(block.params, block.grad_views, strict=True)
        }
        self._layouts = {part: self._lay_out(state, part, grads) for part in self._parts}

    def _sizes(self, kind: int, part: EvenSlice) -> tuple[list[int], int]:
        """Return the bytes of each worker's parcel, and how many gradients of others are kept."""
        partition = self._owner.partitions[kind]
        parcels, kept = [], 0
        for worker, shards in enumerate(partition.shards_of(part)):
            numbers, nbytes = 0, 0
            for shard in shards:
                form, numel = self.forms[shard.param], shard.stop - shard.start
                nbytes += _aligned(numel * partition.like.element_size())
                for each in form.tensors.values():
                    count = numel if each.cut else each.shape.numel()
                    nbytes += _aligned(count * each.dtype.itemsize)
                numbers += _numbers_of(form)
                if worker != self._owner.rank:
                    kept += _aligned(numel, grain_of(partition.like.element_size()))
            parcels.append(nbytes + _aligned(numbers * _NUMBER.itemsize))
        if partition.evenly:  # equal slices are gathered fastest, and all workers send equally much
            parcels = [max(parcels)] * len(parcels)
        return parcels, kept

    def _lay_out(self, state: ParcelState, part: EvenSlice, grads: dict[nn.Parameter, Tensor]) -> _Layout:
        layout = _Layout()
        for kind, partition in enumerate(self._owner.partitions):
            parcels, _ = self._sizes(kind, part)
            slices = list(state.parcels[kind][: sum(parcels)].split(parcels))
            layout.slices.append(slices)
            layout.own.append([])
            kept_at = 0
            for worker, (parcel, shards) in enumerate(zip(slices, partition.shards_of(part), strict=True)):
                own = worker == self._owner.rank
                at = 0
                count = sum(_numbers_of(self.forms[shard.param]) for shard in shards)
                numbers = parcel[parcel.numel() - _aligned(count * _NUMBER.itemsize) :].view(_NUMBER)
                if own:
                    layout.number_views.append(numbers[:count])
                for shard in shards:
                    form, numel = self.forms[shard.param], shard.stop - shard.start
                    weight = _view(parcel, at, shard, shard.param.dtype)
                    at += _aligned(weight.nbytes)
                    tensors = {}
                    for name, each in form.tensors.items():
                        like = shard if each.cut else each.shape
                        tensors[name] = _view(parcel, at, like, each.dtype)
                        at += _aligned(tensors[name].nbytes)
                    used, numbers = numbers[: _numbers_of(form)], numbers[_numbers_of(form) :]
                    marks, values = list(used[:1]), list(used[1:])
                    grad = partition.like.new_empty(0)
                    if not own:
                        grad = _shaped(state.kept[kind][kept_at : kept_at + numel], shard)
                        kept_at += _aligned(numel, grain_of(grad.element_size()))
                        layout.kept_sources.append(shard.cut(grads[shard.param]))
                    piece = Piece(shard, form, weight, tensors, values, marks, grad)
                    layout.own[-1].append(piece) if own else layout.others.append(piece)
        return layout

    def keep(self, part: EvenSlice) -> None:
        if not self._alone and self._layouts[part].others:
            layout = self._layouts[part]
            torch._foreach_copy_([piece.grad for piece in layout.others], layout.kept_sources)

    def pull(self, port: Port, part: EvenSlice, clock: int | None) -> list[Pending[Any]]:
        if self._alone:
            return []
        layout = self._layouts[part]
        for pieces, numbers in zip(layout.own, layout.number_views, strict=True):
            self._pack(pieces, numbers)
        return [
            port.all_gather(slices, Lane.BACK)
            for slices in layout.slices
            if any(len(each) for each in slices)
        ]

    def _pack(self, pieces: list[Piece], numbers: Tensor) -> None:
        targets, sources, values = [], [], []
        for piece in pieces:
            shard, form = piece.shard, piece.form
            tensor, start = self._owner.owned[shard.param]
            targets.append(piece.weight)
            sources.append(shard.cut(tensor, start))
            state = self._owner.state_of(shard.param)
            if state:
                form.check(state)
                for name, target in piece.state.items():
                    value = as_laid_out(state, name, tensor)
                    targets.append(target)
                    sources.append(shard.cut(value, start) if form.tensors[name].cut else value)
            if piece.marks:
                found = [state[name] for name in form.numbers] if state else [0.0] * len(form.numbers)
                values += [float(bool(state)), *found]
        if targets:
            torch._foreach_copy_(targets, sources)
        if values:
            _write_numbers(numbers, values)

    def arrived(self, part: EvenSlice) -> list[Piece]:
        return [] if self._alone else self._layouts[part].others

    def own(self, part: EvenSlice) -> Iterator[tuple[ParamShard, Tensor, dict[str, Any], int]]:
        for partition in self._owner.partitions:
            for shard in partition.shards_of(part)[self._owner.rank]:
                tensor, start = self._owner.owned[shard.param]
                yield shard, tensor, self._owner.state_of(shard.param), start


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
