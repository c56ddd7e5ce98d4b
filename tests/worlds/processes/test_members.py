"""Several ranks to a replica, each with the whole model: as one rank with all their data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import BSP, OSP, SSDSGD, DiLoCo, LocalSGD, SelSync
from tests.conformance.table import AnyStrategy
from tests.support.limits import HANG_S
from tests.support.sharded_runs import adam, blocks_of_any_size, farthest, mesh, sgd, trained

pytestmark = pytest.mark.processes

ROUNDING = 5e-6


@pytest.mark.parametrize(
    "strategy",
    [
        BSP(),
        LocalSGD(period=3, weighted=True),
        SelSync(delta=0.05, window=5),
        SelSync(delta=0.05, window=5, aggregate="gradients"),
        OSP(budget=0.5, growth=5),
        SSDSGD(warmup=5, delay=3),
        DiLoCo(period=6, fragments=2, delay=2),
    ],
    ids=str,
)
def test_two_ranks_of_a_host_equal_one_with_the_doubled_batch(crew, strategy: AnyStrategy) -> None:
    inside = crew(4).run(trained, strategy, blocks_of_any_size, adam, "inner", 50)
    plain = crew(2).run(trained, strategy, blocks_of_any_size, adam, "plain", 50)
    for rank, (published, own) in enumerate(inside):
        assert farthest(published, plain[0][0]) < ROUNDING
        assert farthest(own, plain[rank // 2][1]) < ROUNDING
    for one, other in ((0, 1), (2, 3)):
        assert farthest(inside[one][1], inside[other][1]) == 0, "ranks of one host have different weights"


class _Branches(nn.Module):
    """A layer that every rank uses, one that only rank 1 uses, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.odd, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.shared(x))
        return self.odd(y) if dist.get_rank() == 1 else y


def _branches(steps: int) -> tuple[dict[str, Tensor], list[bool], Tensor, Tensor]:
    torch.manual_seed(dist.get_rank())  # only the first rank's weights count
    model = _Branches()
    optimizer = sgd(model)
    groups: dict[str, Any] = {"group": mesh()["replica"], "inner": mesh()["shard"]}
    with offbeat.attach(model, optimizer, LocalSGD(period=100), timeout_s=HANG_S, **groups) as sync:
        start = model.unused.weight.detach().clone()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
        missing = [
            param.grad is None for param in (model.shared.weight, model.odd.weight, model.unused.weight)
        ]
        own = {name: value.detach().clone() for name, value in model.named_parameters()}
        mean_before = model.norm.running_mean.clone()  # type: ignore[union-attr, operator]
        with sync.consensus():
            mean = model.norm.running_mean.clone()  # type: ignore[union-attr, operator]
        assert torch.equal(mean_before, model.norm.running_mean)  # type: ignore[arg-type]
    assert torch.equal(start, model.unused.weight), "weight decay must leave unused parameters alone"
    return own, missing, start, mean


def test_a_gradient_that_one_rank_has_is_the_hosts_and_buffers_are_published_alike(crew) -> None:
    ranks = crew(4).run(_branches, 3)
    assert all(torch.equal(ranks[0][2], start) for _, _, start, _ in ranks), "all start with one model"
    assert [missing for _, missing, _, _ in ranks] == [[False, False, True]] * 2 + [[False, True, True]] * 2
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(ranks[one][0][name], ranks[other][0][name]) for name in ranks[0][0])
    assert not torch.equal(ranks[0][0]["shared.weight"], ranks[2][0]["shared.weight"])
    assert all(torch.equal(ranks[0][3], mean) for _, _, _, mean in ranks)
