"""Packing: several tensors at once, such as a shard's share of an update."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs.codec import Codec


def room(codec: Codec, like: list[Tensor]) -> list[Tensor]:
    """Memory for the packets of such tensors."""
    return [
        torch.empty(codec.nbytes(part.numel(), part.dtype), dtype=torch.uint8, device=part.device)
        for part in like
    ]


def pack(codec: Codec, tensors: list[Tensor], packets: list[Tensor], count: int) -> None:
    """Encode for the `count`-th time; what does not travel is left in the tensors."""
    for tensor, packet in zip(tensors, packets, strict=True):
        if tensor.numel():
            codec.encode(codec.at(count), tensor, packet)
            codec.add(packet, tensor, -1.0)


def unpack(codec: Codec, packets: list[Tensor], into: list[Tensor]) -> None:
    for packet, tensor in zip(packets, into, strict=True):
        if tensor.numel():
            codec.decode(packet, tensor)
