"""Codecs under test, tensors for them, and what comes out at the other end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from offbeat import BFloat16, Codec, Half, Quantize, RandomK, TopK
from offbeat.core.pending import Arrived, block_on
from offbeat.core.port import Lane, Op

PACKETS = [
    TopK(0.1),
    TopK(0.1, sampled=False),
    TopK(0.1, chunk=64),
    TopK(0.1, chunk=300, bits=2),
    RandomK(0.1),
    RandomK(0.1, unbiased=True),
    Quantize(8),
    Quantize(4),
    Quantize(2),
    Quantize(1),
    Quantize(8, stochastic=True),
    Quantize(4, stochastic=True),
    Quantize(1, stochastic=True),
    Half(),
    BFloat16(),
]

every_codec = pytest.mark.parametrize("made", PACKETS, ids=str)


def draw(seed: int, numel: int, shape: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tensors as gradients are, and as they are in bad cases."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if shape == "sparse":
        x[x.abs() < 1.5] = 0
    elif shape == "ties":
        x = x.round()
    elif shape == "heavy":
        x = x**5 * 100
    elif shape == "tiny":
        x = x * 1e-42
    elif shape == "zero":
        x.zero_()
    return x.to(dtype)


SHAPES = ["normal", "sparse", "ties", "heavy", "tiny", "zero"]
tensors = st.builds(draw, st.integers(0, 10**6), st.integers(1, 3000), st.sampled_from(SHAPES))
large_tensors = st.builds(draw, st.integers(0, 10**6), st.integers(65_000, 140_000), st.sampled_from(SHAPES))


def passed(made: Codec, x: Tensor, memory: Any = None) -> Tensor:
    """x, as it comes out at the other end."""
    memory = made.init(x) if memory is None else memory
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    made.encode(memory, x.clone(), packet)
    decoded = torch.full_like(x, 7.0)
    made.decode(packet, decoded)
    return decoded


def square(x: Tensor) -> float:
    return x.double().square().sum().item()


class Lonely:
    """A port without others."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.lanes: set[Lane] = set()

    def all_reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Arrived[Tensor]:
        self.lanes.add(lane)
        return Arrived(tensor)

    def all_gather(self, shares: list[Tensor], lane: Lane = Lane.FRONT) -> Arrived[list[Tensor]]:
        self.lanes.add(lane)
        return Arrived(shares)


def averaged(made: Codec, stream: Any, x: Tensor) -> Tensor:
    port: Any = Lonely()

    async def there_and_back() -> None:
        sent = made.start(stream, x, port)
        await made.finish(stream, x, port, await made.exchange(stream, x, port, sent))

    block_on(there_and_back())
    assert port.lanes == {stream.lane}
    return x
