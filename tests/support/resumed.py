"""Runs that are stopped, saved, built anew and resumed, on a rank of a crew."""

from __future__ import annotations

import io
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from tests.conformance.features import batch_norm
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.limits import HANG_S

STEPS = 11
Tensors = dict[str, torch.Tensor]


def train_between(
    strategy: AnyStrategy, optimizer: str, first: int, last: int, saved: Any = None
) -> tuple[Tensors, Any]:
    """Steps `first` to `last` of a run, from what was saved before: its end, and what to save there."""
    rank = dist.get_rank()
    # Before a batch norm a bias has gradients of rounding errors alone. Adam makes them as large as any.
    model = (batch_norm if strategy.server_half() is None else loops.mlp)(100 * first + rank)
    opt = loops.OPTIMIZERS[optimizer](model)
    if saved:
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
    with offbeat.attach(model, opt, strategy, timeout_s=HANG_S) as sync:
        if saved:
            sync.load_state_dict(saved["sync"])
        data = islice(loops.batches(rank, last), first, None)
        loops.train(model, opt, data, samples=sync.samples)
        state = {"model": model.state_dict(), "optimizer": opt.state_dict(), "sync": sync.state_dict()}
        blob = io.BytesIO()
        torch.save(state, blob)
        return loops.tensors(model), blob.getvalue()


def straight_run(strategy: AnyStrategy, optimizer: str) -> Tensors:
    return train_between(strategy, optimizer, 0, STEPS)[0]


def resumed_run(strategy: AnyStrategy, optimizer: str, stop: int) -> Tensors:
    _, blob = train_between(strategy, optimizer, 0, stop)
    saved = torch.load(io.BytesIO(blob), weights_only=True)
    # as users do: the model and the optimizer of rank 0, for all; and each rank its own of the strategy
    shared: list[Any] = [{"model": saved["model"], "optimizer": saved["optimizer"]}]
    dist.broadcast_object_list(shared)
    return train_between(strategy, optimizer, stop, STEPS, {**shared[0], "sync": saved["sync"]})[0]
