"""Packets between a worker and one shard: one for each slice of the flat weights that the shard owns.

Both ends know the codecs of a strategy's `ServerHalf`, so a codec's index tells how many bytes to expect.
"""

from __future__ import annotations

import torch

from offbeat.codecs import Codec
from offbeat.server.messages import Tensors


def allocate(codec: Codec, slices: Tensors) -> Tensors:
    """Allocate the packets for these slices."""
    return [
        torch.empty(
            codec.nbytes(part.numel(), part.dtype) if part.numel() else 0,
            dtype=torch.uint8,
            device=part.device,
        )
        for part in slices
    ]


def encode(codec: Codec, slices: Tensors, packets: Tensors, count: int, residual: bool = True) -> None:
    """Encode the slices, for the `count`-th time. With `residual`, leave their residual in the slices."""
    for part, packet in zip(slices, packets, strict=True):
        if part.numel():
            (codec.encode_residual if residual else codec.encode)(codec.memory_at(count), part, packet)


def decode(codec: Codec, packets: Tensors, into: Tensors) -> None:
    """Decode the packets into the slices `into`."""
    for packet, part in zip(packets, into, strict=True):
        if part.numel():
            codec.decode(packet, part)
