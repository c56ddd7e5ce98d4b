"""At its degenerate setting a strategy equals BSP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import offbeat
from tests.conformance.table import TABLE, AnyStrategy, Case
from tests.support import loops

STEPS = 12


def _trained(strategy: AnyStrategy) -> torch.Tensor:
    return loops.flat(loops.attached(dist.get_rank(), strategy, "sgd", STEPS)[0])


@pytest.mark.parametrize("case", [c for c in TABLE if c.degenerate], ids=lambda case: str(case.degenerate))
def test_degenerate_setting_equals_bsp(crew, case: Case) -> None:
    bsp = crew(2).run(_trained, offbeat.BSP())
    ours = crew(2).run(_trained, case.degenerate)
    assert torch.equal(ours[0], ours[1])
    if case.exact:
        assert torch.equal(bsp[0], ours[0])
    else:  # a step rounds a weight a few times, each by at most half an ulp of the largest weight
        eps = torch.finfo(torch.float32).eps
        bound = 2 * STEPS * eps * bsp[0].abs().max().item()
        torch.testing.assert_close(ours[0], bsp[0], rtol=0, atol=bound)
