"""Methods of torch itself: DDP, DDP with gradients sent as float16, and PostLocalSGD."""

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

from benchmarks.peers.training import RankSetup, Training, averaged_weights


@contextmanager
def ddp(setup: RankSetup) -> Iterator[Training]:
    """Train with DistributedDataParallel, optionally with gradients sent as float16."""
    wrapped = DistributedDataParallel(setup.model)
    if setup.settings.get("fp16"):
        wrapped.register_comm_hook(None, fp16_compress_hook)
    yield Training(step=lambda batch: setup.step(wrapped, [setup.optimizer], batch))


@contextmanager
def post_local_sgd(setup: RankSetup) -> Iterator[Training]:
    """Train with torch's PostLocalSGD."""
    start, period = setup.settings["start"], setup.settings["period"]
    wrapped = DistributedDataParallel(setup.model)
    # A host has one worker, so there is no local group to average gradients in.
    state = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=period, warmup_steps=start)
    optimizer = PostLocalSGDOptimizer(setup.optimizer, averager)
    yield Training(
        step=lambda batch: setup.step(wrapped, [optimizer], batch),
        global_model=lambda: averaged_weights(setup.model),
    )


@contextmanager
def no_exchange(setup: RankSetup) -> Iterator[Training]:
    """Train without any exchange: a limit, not a contender."""
    yield Training(
        step=lambda batch: setup.step(setup.model, [setup.optimizer], batch),
        global_model=lambda: averaged_weights(setup.model),
    )
