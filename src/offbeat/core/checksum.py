"""Checksum of a model: do all workers hold the same weights and buffers, to the bit?

The bits of every tensor are added up as integers, so that any single difference shows. One small reduction
compares the sums of all workers; only where they differ does a second one find the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError

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
    device = sums[0].device
    whole = torch.stack([each.to(device) for each in sums])
    own = torch.cat([whole >> 32, whole & 0xFFFFFFFF])  # halves: the least int64 would have no negative
    extremes = await port.all_reduce(torch.cat([own, -own]), Op.MAX)
    largest, smallest = extremes.chunk(2)
    return bool((largest == -smallest).all())


def bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, taken as integers of its size."""
    flat = tensor.contiguous().flatten()
    whole = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    return whole.view(_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
