"""The virtual ring adds in gloo's own order: its sums are the real ones, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.port import Op
from offbeat.worlds.virtual.reductions import EXACT_UP_TO, all_reduce, ring_sum
from tests.support.crew import Crew

pytestmark = pytest.mark.virtual

SIZES = [1, 2, 3, 4, 5, 17, 1000, 4099, 300_000, (8 << 20) // 4 + 13]


def drawn(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Numbers of many magnitudes, so that any other order of adding them shows."""
    generator = torch.Generator().manual_seed(100 * size + rank)
    return torch.randn(size, generator=generator, dtype=dtype) * torch.exp(
        4 * torch.randn(size, generator=generator, dtype=dtype)
    )


def _really_reduced(dtype: torch.dtype, op: Op) -> list[Tensor]:
    """Of rank 0 only what it got: all ranks get the same bits."""
    reduced = []
    for size in SIZES:
        tensor = drawn(size, dtype, dist.get_rank())
        if op is Op.MEAN:
            tensor.mul_(1 / dist.get_world_size())
        dist.all_reduce(tensor, dist.ReduceOp.MAX if op is Op.MAX else dist.ReduceOp.SUM)
        reduced.append(tensor)
    return reduced if dist.get_rank() == 0 else []


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_equal_gloo_bit_for_bit(crew: Callable[[int], Crew], world: int, dtype: torch.dtype) -> None:
    real = crew(world).run(_really_reduced, dtype, Op.SUM)[0]
    for size, sum_of_gloo in zip(SIZES, real, strict=True):
        ours = ring_sum([drawn(size, dtype, rank) for rank in range(world)])
        assert torch.equal(ours, sum_of_gloo), size


@pytest.mark.parametrize("op", [Op.MEAN, Op.MAX])
def test_means_and_maxima_equal_gloo_bit_for_bit(crew: Callable[[int], Crew], op: Op) -> None:
    real = crew(3).run(_really_reduced, torch.float32, op)[0]
    for size, reduced in zip(SIZES, real, strict=True):
        tensors = [drawn(size, torch.float32, rank) for rank in range(3)]
        all_reduce(tensors, op)
        assert all(torch.equal(tensor, reduced) for tensor in tensors), size


@pytest.mark.parametrize("world", [1, EXACT_UP_TO, EXACT_UP_TO + 1])
def test_large_worlds_add_up_too(world: int) -> None:
    tensors = [torch.full((2, 3), float(rank)) for rank in range(world)]
    assert torch.equal(ring_sum(tensors), torch.full((2, 3), world * (world - 1) / 2))
