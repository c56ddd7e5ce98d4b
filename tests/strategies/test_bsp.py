"""BSP is DDP, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat
from tests.support import loops

pytestmark = pytest.mark.processes


def _both(
    optimizer: str, clip: float | None, accumulate: int, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    reference = loops.mlp(0)
    ddp = DistributedDataParallel(reference)
    opt = loops.OPTIMIZERS[optimizer](reference)
    loops.train(ddp, opt, loops.batches(rank, steps), clip=clip, accumulate=accumulate, no_sync=ddp.no_sync)
    ours, _ = loops.attached(rank, offbeat.BSP(), optimizer, steps, clip=clip, accumulate=accumulate)
    return loops.flat(reference), loops.flat(ours)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [2])
def test_bsp_equals_ddp(crew, optimizer: str, accumulate: int, world: int) -> None:
    results = crew(world).run(_both, optimizer, 0.5, accumulate, 50 * accumulate)
    for ddp, ours in results:
        assert torch.equal(ddp, ours)
    assert torch.equal(results[0][1], results[1][1])
