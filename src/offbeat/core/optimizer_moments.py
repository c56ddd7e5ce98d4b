"""Averages of an optimizer's moments over all workers: momentum, and Adam's two.

A moment is laid out as the weights are, and travels with a mark for each parameter: 1 if this worker has that
moment of it. The mean is over those who have it; a worker that has none, since the parameter never got a
gradient there, stays without.

A first moment that is averaged without its second moment may be far too long for it: where this worker saw
hardly any gradient, Adam divides the others' by next to nothing. So `limit_first_moments` keeps to what Adam
and Adamax themselves keep to, whatever the gradients are (by Cauchy-Schwarz, and term by term):

    |m| ≤ κ √v,   κ² = (1 − β₁)² / ((1 − β₂)(1 − β₁²/β₂)),   7.3² with Adam's own β
    |m| ≤ κ u,    κ = (1 − β₁) / (1 − β₁/β₂),                1.01 with Adamax' own β

Means of both keep to it, too, so it changes nothing where both are averaged.

`share_state` makes the whole state the same on all workers, after which they may step with the same gradients
and stay equal: means of all moments, and the largest count of steps. A parameter of which some worker has no
state starts anew on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica

FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("exp_avg_sq", "square_avg", "exp_inf")
MOMENTS = (*FIRST, *SECOND, "max_exp_avg_sq", "grad_avg", "acc_delta", "sum")  # of torch's own
COUNTS = ("step", "mu_product")  # numbers that go by the steps of a parameter


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


def limit_first_moments(replica: Replica) -> None:
    """Limit each first moment of Adam or Adamax to what its second moment on this worker allows."""
    for group in replica.optimizer.groups:
        betas = tuple(group.get("betas") or ())
        for param in group["params"] if len(betas) == 2 else ():
            state = replica.optimizer.state_of(param)
            limit = _limit(state, *map(float, betas)) if "exp_avg" in state else None
            if limit is not None:
                state["exp_avg"].clamp_(-limit, limit)


def _limit(state: Mapping[str, Tensor], first: float, second: float) -> Tensor | None:
    """Return the largest first moment that gradients can make beside this second one; None: any."""
    if "exp_avg_sq" in state and first**2 < second < 1:
        ratio = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
        return state["exp_avg_sq"].sqrt().mul_(ratio)
    if "exp_inf" in state and first < second:
        return state["exp_inf"] * ((1 - first) / (1 - first / second))
    return None


def _moment_of(replica: Replica, param: Tensor, names: Sequence[str]) -> Tensor | None:
    state = replica.optimizer.state_of(param)  # type: ignore[arg-type]
    found = [state[name] for name in names if isinstance(state.get(name), Tensor)]
    return found[0] if found and found[0].shape == param.shape else None


def is_shareable(replica: Replica) -> bool:
    """Return whether `share_state` knows all that this worker's optimizers keep."""
    states = [replica.optimizer.state_of(param) for block in replica.blocks for param in block.params]
    kept = {name for state in states for name, value in state.items() if value is not None}
    return kept <= {*MOMENTS, *COUNTS} and not replica.optimizer.watch.reason()[1]


async def share_state(replica: Replica, port: Port) -> None:
    """Make the optimizer's state the same on all workers. It must be shareable on all of them."""
    params = [param for block in replica.blocks for param in block.params]
    states = [replica.optimizer.state_of(param) for param in params]
    named = [float(any(isinstance(state.get(name), Tensor) for state in states)) for name in MOMENTS]
    kept = [float(bool(state)) for state in states]
    counts = [float(state.get(name, -1.0)) for name in COUNTS for state in states]
    numbers = [*named, *kept, *(-each for each in kept), *counts]
    vector = replica.weights[0].new_tensor(numbers, dtype=torch.float64)
    agreed: list[float] = (await port.all_reduce(vector, Op.MAX)).tolist()
    named, most, least, *largest = _cut(agreed, len(MOMENTS), *[len(params)] * (2 + len(COUNTS)))
    for param, anywhere, nowhere in zip(params, most, least, strict=True):
        if anywhere + nowhere > 0:  # here, and not everywhere; or there, and not here
            replica.optimizer.forget(param)
    for name, values in zip(COUNTS, largest, strict=True):
        for param, value in zip(params, values, strict=True):
            state = replica.optimizer.state_of(param)
            if isinstance(state.get(name), Tensor):
                state[name].fill_(value)
            elif name in state:
                state[name] = type(state[name])(value)
    for name, exists in zip(MOMENTS, named, strict=True):
        if exists:
            await average_moments(replica, port, (name,))


def _cut(values: list[float], *sizes: int) -> list[list[float]]:
    ends = list(accumulate(sizes))
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
