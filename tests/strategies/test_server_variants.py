"""SSD-SGD and OSP through a server, over real processes: equal to BSP, to collectives, to virtual time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat import BSP, OSP, SSDSGD
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.beside import lightly
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.resumed import resumed_run, straight_run

pytestmark = pytest.mark.processes

STEPS = 12
Hire = Callable[[int], Crew]


def _agreed(strategy: AnyStrategy, optimizer: str, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """A rank's own weights, and those that all agree on."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    opt = loops.OPTIMIZERS[optimizer](model)
    with offbeat.attach(model, opt, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, opt, loops.batches(rank, steps), samples=sync.samples)
        own = loops.flat(model)
        sync.settle()
        with sync.consensus():
            return own, loops.flat(model)


@pytest.mark.parametrize(("world", "optimizer"), [(2, "momentum"), (2, "adamw"), (3, "momentum")])
def test_all_warm_up_is_bsp_under_any_optimizer(crew: Hire, world: int, optimizer: str) -> None:
    """Since the server steps once a step, with the mean, momentum is BSP's as well."""
    bsp = crew(world).run(_agreed, BSP(), optimizer)
    ours = crew(world).run(lightly, _agreed, SSDSGD(on="server", warmup=100), optimizer)
    bound = 3 * world * STEPS * torch.finfo(torch.float32).eps * bsp[0][0].abs().max().item()
    for (own, agreed), (_, theirs) in zip(ours, bsp, strict=True):
        assert torch.equal(own, agreed) and torch.equal(own, ours[0][0])
        torch.testing.assert_close(own, theirs, rtol=0, atol=bound)
        assert world > 2 or torch.equal(own, theirs)


@pytest.mark.parametrize(("warmup", "delay"), [(2, 1), (0, 3)])
def test_stopped_with_anything_in_flight_and_resumed(crew: Hire, warmup: int, delay: int) -> None:
    """Before, at and after the end of the warm-up; with a push, with a pull, with both."""
    strategy = SSDSGD(on="server", warmup=warmup, delay=delay)
    straight = crew(2).run(lightly, straight_run, strategy, "momentum")
    for stop in (1, 2, 4, 5):
        stopped = crew(2).run(lightly, resumed_run, strategy, "momentum", stop)
        for one, other in zip(straight, stopped, strict=True):
            assert loops.equal(one, other), stop


@pytest.mark.parametrize("world", [2, 3])
def test_osp_on_the_server_trains_as_on_collectives(crew: Hire, world: int) -> None:
    results = []
    for on in ("collectives", "server"):
        strategy = OSP(on=on, budget=0.6, growth=3)
        results.append(crew(world).run(lightly, _agreed, strategy, "momentum"))
    for (own, agreed), (theirs, all_theirs) in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(agreed, all_theirs, rtol=1e-4, atol=1e-5)
        assert not torch.equal(own, agreed), "some of it was late"


def _lost(strategy: AnyStrategy) -> int:
    """The last rank dies in the middle of a run."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    sync = offbeat.attach(model, optimizer, strategy, buffers="local", timeout_s=HANG_S)

    def die(step: int) -> None:
        if rank == dist.get_world_size() - 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    loops.train(model, optimizer, loops.batches(rank, STEPS), samples=sync.samples, after_step=die)
    return sync.metrics.steps


@pytest.mark.parametrize(
    "strategy", [SSDSGD(on="server", warmup=2, delay=2), OSP(on="server", budget=0.5)], ids=str
)
def test_the_others_train_on_without_a_lost_rank(strategy: Any) -> None:
    crew = Crew(3)
    try:
        crew.start(_lost, strategy)
        assert crew.outcomes([0, 1]) == [(True, STEPS)] * 2
    finally:
        crew.dismiss()
