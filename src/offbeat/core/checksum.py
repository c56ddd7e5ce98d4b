"""Checksum of a model: do all workers hold the same weights and buffers, to the bit?

The bits of every tensor are added up as integers, weighted by their places, so that any single difference
shows, and so do values that have changed places (masks of pruning have equally many ones). One small
reduction compares the sums of all workers; only where they differ does a second one find the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError

COLUMNS = 1024
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # odd, with bits in all places
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


async def check_identical(replica: Replica, port: Port) -> None:
    """Raise an error that names the first tensor in which the workers' models differ."""
    if port.world == 1:
        return
    tensors = [*replica.weights, *replica.buffers.all()]
    if await _equal(tensors, port):
        return
    named: list[tuple[str, Tensor]] = []
    for block in replica.blocks:
        named += zip(block.names, block.params, strict=True)
    for name, tensor in [*named, *replica.model.named_buffers()]:
        if not await _equal([tensor.detach()], port):
            raise OffbeatError(
                f"the ranks do not hold the same model inside consensus(): {name} differs. Something besides "
                "the attached optimizers changes it on some ranks, or an optimizer keeps state that the "
                "strategy cannot see"
            )


async def _equal(tensors: Iterable[Tensor], port: Port) -> bool:
    """Return whether these tensors have the same bits on all workers."""
    sums = [bits(tensor) for tensor in tensors]
    return all(await same_on_all(torch.stack([each.to(sums[0].device) for each in sums]), port))


async def same_on_all(numbers: Tensor, port: Port) -> list[bool]:
    """Return for each of these integers whether all workers have the same one there."""
    own = torch.stack([numbers >> 32, numbers & 0xFFFFFFFF])  # halves: the least int64 would have no negative
    largest, smallest = (await port.all_reduce(torch.cat([own, -own]), Op.MAX)).chunk(2)
    same: list[bool] = (largest == -smallest).all(0).tolist()
    return same


def bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, taken as integers of eight bytes, weighted by their places.

    The places are those in a matrix, by its rows and columns: no copy of the tensor is made.
    """
    flat = tensor.detach().contiguous().flatten()
    whole = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    together = 8 // whole.element_size()
    if whole.storage_offset() % together:
        whole = whole.clone()
    cut = len(whole) // together * together
    numbers, rest = whole[:cut].view(torch.int64), whole[cut:].view(_INTEGERS[whole.element_size()])
    rows = len(numbers) // COLUMNS
    matrix, rest = numbers[: rows * COLUMNS].view(rows, COLUMNS), torch.cat([numbers[rows * COLUMNS :], rest])
    by_row, by_column = matrix.sum(1), matrix.sum(0)
    # The weight of an element is odd in all: no change of one element is a multiple of 2^64.
    columns, others = _mixed(by_column) | 1, _mixed(rest, rows + COLUMNS) | 1
    return (others * rest).sum() + (columns * by_column).sum() + ((_mixed(by_row) << 1) * by_row).sum()


def _mixed(numbers: Tensor, start: int = 0) -> Tensor:
    """Return as many integers, which look random and are the same on all workers."""
    mixed = torch.arange(start + 1, start + 1 + len(numbers), device=numbers.device) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 31)) * _FACTORS[1]
    return mixed ^ (mixed >> 29)
