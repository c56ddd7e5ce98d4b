"""Packets between a worker and one shard of a server: of each part of the weights that the shard holds, one.

A push travels in one of its strategy's `forms`, codecs counted from 1, or in form 0, as it is. Both ends know
the forms, so the number of one says how many bytes come.
"""

from __future__ import annotations

import torch

from offbeat.codecs import Codec
from offbeat.server.messages import Tensors


def allocate(codec: Codec, parts: Tensors) -> Tensors:
    """Memory for the packets of such parts."""
    return [
        torch.empty(
            codec.nbytes(part.numel(), part.dtype) if part.numel() else 0,
            dtype=torch.uint8,
            device=part.device,
        )
        for part in parts
    ]


def encode(codec: Codec, parts: Tensors, packets: Tensors, count: int, remainder: bool = True) -> None:
    """Fill the packets, for the `count`-th time. What does not travel is left in the parts, if wanted."""
    for part, packet in zip(parts, packets, strict=True):
        if part.numel():
            (codec.encode_residual if remainder else codec.encode)(codec.memory_at(count), part, packet)


def decode(codec: Codec, packets: Tensors, into: Tensors) -> None:
    for packet, part in zip(packets, into, strict=True):
        if part.numel():
            codec.decode(packet, part)
