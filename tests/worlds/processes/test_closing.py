"""The end of an attachment: ranks that should hold one model and do not are told so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import offbeat
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def _own_rates() -> str:
    """Let each rank's scheduler follow the rank's own loss."""
    model = loops.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + dist.get_rank()))
    sync = offbeat.attach(model, optimizer, offbeat.BSP(), timeout_s=HANG_S)
    loops.train(model, optimizer, loops.batches(dist.get_rank(), 2))
    with pytest.raises(offbeat.OffbeatError) as told:
        sync.close()
    return str(told.value)


def test_replicas_that_have_drifted_apart_are_told_at_the_end(crew) -> None:
    assert all("do not hold the same model" in told for told in crew(2).run(_own_rates))
