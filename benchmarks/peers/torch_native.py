"""What torch itself has: DDP, DDP whose gradients travel in 16 bits, and PostLocalSGD."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.training import Bench, Training, averaged


@contextmanager
def ddp(bench: Bench) -> Iterator[Training]:
    wrapped = DistributedDataParallel(bench.model)
    if bench.settings.get("fp16"):
        wrapped.register_comm_hook(None, fp16_compress_hook)
    yield Training(step=lambda batch: bench.step(wrapped, bench.optimizer, batch))


@contextmanager
def post_local_sgd(bench: Bench) -> Iterator[Training]:
    start, period = bench.settings["start"], bench.settings["period"]
    wrapped = DistributedDataParallel(bench.model)
    # A host has one worker, so there is no group on a host whose gradients could be averaged in between.
    state = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=start)
    optimizer = PostLocalSGDOptimizer(bench.optimizer, averager)
    yield Training(
        step=lambda batch: bench.step(wrapped, optimizer, batch), looking=lambda: averaged(bench.model)
    )


@contextmanager
def alone(bench: Bench) -> Iterator[Training]:
    """No contender but a limit: workers that never exchange anything."""
    yield Training(
        step=lambda batch: bench.step(bench.model, bench.optimizer, batch),
        looking=lambda: averaged(bench.model),
    )
