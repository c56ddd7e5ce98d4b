"""DiLoCo by itself: how it cuts, and that a steady step takes no memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat import DiLoCo
from offbeat.core.conductor import Conductor
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Lane, Op
from offbeat.core.replica import Replica
from tests.support.allocations import largest_allocation


@given(
    lines=st.integers(0, 50), fragments=st.integers(1, 12), dtype=st.sampled_from([torch.float64, torch.half])
)
def test_fragments_are_even_and_cover_all_once(lines: int, fragments: int, dtype: torch.dtype) -> None:
    flat = torch.arange(lines * 64 // dtype.itemsize).to(dtype)
    strategy = DiLoCo(period=fragments, fragments=fragments)
    parts = [strategy._slice(flat, p) for p in range(fragments)]
    assert torch.equal(torch.cat(parts), flat)
    sizes = [part.nbytes for part in parts]
    assert max(sizes) - min(sizes) <= 64
    assert max(sizes) == sizes[-1], "in what the last travels there is room for each"


class Apart:
    """The port of one of two workers, where the other has zeros to say."""

    elastic = False

    rank, world = 0, 2

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Pending[Tensor]:
        return Arrived(tensor.mul_(0.5))

    def reduce_scatter(
        self, slices: list[Tensor], op: Op = Op.MEAN, lane: Lane = Lane.FRONT
    ) -> Pending[Tensor]:
        return Arrived(slices[0].mul_(0.5))

    def all_gather(self, slices: list[Tensor], lane: Lane = Lane.FRONT) -> Pending[list[Tensor]]:
        slices[1].zero_()
        return Arrived(slices)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_steady_step_makes_nothing_of_the_models_size(momentum: float, in_place: bool) -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    replica = Replica(model, optimizer=optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    delay, mix = (0, 0.0) if in_place else (1, 0.5)
    strategy = DiLoCo(period=4, fragments=2, delay=delay, mix=mix, outer_momentum=momentum, average=0.5)
    conductor = Conductor(strategy, replica, Apart(), Ledger(0, lambda: 0.0))  # type: ignore[arg-type]
    nbytes = sum(weight.nbytes for weight in replica.weights)
    taken = largest_allocation(4, conductor, optimizer)
    assert taken >= nbytes / 4, "a fragment's slice is taken once, and the test sees it"
    assert largest_allocation(8, conductor, optimizer) < 1000
