"""DiLoCo on a server over processes: a round ends by its deadline, also if a worker never pushes again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import DiLoCo
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def _trained(strategy: DiLoCo) -> torch.Tensor:
    """Rank 0 makes four rounds, and rank 1 two: then it is still a member. Returns what is published."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, 8 if rank == 0 else 4))
        dist.barrier()
        with sync.consensus():
            published = loops.flat(model).clone()
        dist.barrier()
    return published


@pytest.mark.parametrize("limits", [{"grace_s": 0.1}, {"quorum": 1}], ids=str)
def test_nobody_waits_for_a_worker_that_does_not_come(crew, limits: dict[str, float]) -> None:
    published, published_there = crew(2).run(_trained, DiLoCo(period=2, on="server", **limits))
    assert torch.equal(published, published_there)
    assert not torch.equal(published, loops.flat(loops.mlp(0)))
