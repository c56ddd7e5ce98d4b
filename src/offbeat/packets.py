"""Packets between a worker and one shard of a server: of each part of the weights that the shard holds, one.

A push travels in one of its strategy's `forms`, codecs counted from 1, or in form 0, as it is. Both ends know
the forms, so the number of one says how many bytes come.
"""

from __future__ import annotations

import torch

from offbeat.codecs import Codec
from offbeat.messages import Tensors


def room(codec: Codec, parts: Tensors) -> Tensors:
    """Memory for the packets of such parts."""
    return [
        torch.empty(codec.nbytes(part.numel(), part.dtype) if part.numel() else 0, dtype=torch.uint8)
        for part in parts
    ]


def pack(codec: Codec, parts: Tensors, packets: Tensors, remainder: bool = False) -> Tensors:
    """Fill the packets. With `remainder`, what does not travel is left in the parts."""
    for part, packet in zip(parts, packets, strict=True):
        if part.numel():
            own = packet if not part.is_cuda else torch.empty_like(packet, device=part.device)
            codec.encode(None, part, own)
            if remainder:
                codec.add(own, part, -1.0)
            if own is not packet:
                packet.copy_(own)
    return packets


def unpack(codec: Codec, packets: Tensors, into: Tensors) -> Tensors:
    for packet, part in zip(packets, into, strict=True):
        if part.numel():
            codec.decode(packet, part)
    return into
