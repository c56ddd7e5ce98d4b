"""Averages of an optimizer's moments over all workers: momentum, and Adam's two.

A moment is laid out as the weights are, and travels with a mark for each parameter: 1 if this worker has that
moment of it. The mean is over those who have it; a worker that has none, since the parameter never got a
gradient there, stays without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.core.port import Port
from offbeat.core.replica import Replica

FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("exp_avg_sq", "square_avg")


async def average_moments(replica: Replica, port: Port, names: Sequence[str]) -> None:
    """Replace the moment of these names, whichever of them a parameter has, by its mean over all workers."""
    moments, marks, buffers, sent = [], [], [], []
    for block in replica.blocks:
        of_block = [_moment_of(replica, param, names) for param in block.params]
        dtype = torch.promote_types(block.weight.dtype, torch.float32)
        flat = torch.zeros_like(block.weight, dtype=dtype)
        for moment, view in zip(of_block, block.views(flat), strict=True):
            if moment is not None:
                view.copy_(moment)
        marked = flat.new_tensor([float(moment is not None) for moment in of_block])
        moments.append(of_block)
        marks.append(marked)
        buffers.append(flat)
        sent += [port.all_reduce(flat), port.all_reduce(marked)]
    for pending in sent:
        await pending
    for block, of_block, marked, flat in zip(replica.blocks, moments, marks, buffers, strict=True):
        for moment, view, mark in zip(of_block, block.views(flat), marked, strict=True):
            if moment is not None:
                moment.copy_(view / mark)


def _moment_of(replica: Replica, param: Tensor, names: Sequence[str]) -> Tensor | None:
    state = replica.optimizer.state_of(param)  # type: ignore[arg-type]
    found = [state[name] for name in names if isinstance(state.get(name), Tensor)]
    return found[0] if found and found[0].shape == param.shape else None
