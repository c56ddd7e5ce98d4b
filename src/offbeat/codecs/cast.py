"""Casts: entries in a number format of 2 bytes, which a reduction can still add up.

    half        IEEE half precision. An entry within ±65504 is off by at most 2⁻¹¹ of itself, or by 2⁻²⁵ where
                that is more; larger entries become ±65504. The mean divides before it sums, so it does not
                overflow.
    bfloat16    The range of float32. An entry is off by at most 2⁻⁸ of itself.

A sum over N workers rounds N−1 times more, each time relative to the sum so far: with many workers `half` is
more exact than `bfloat16`, if the entries fit its range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offbeat.codecs.base import Codec
from offbeat.codecs.cuda import ops
from offbeat.core.finite import nan_if_not_finite

LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Cast(Codec):
    """A codec that converts entries to `wire_dtype`."""

    cuts_anywhere = True
    summable = True
    wire_dtype: ClassVar[torch.dtype]

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * self.wire_dtype.itemsize

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        packet.view(self.wire_dtype).copy_(tensor)

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        into.add_(packet.view(self.wire_dtype), alpha=factor)

    def decode(self, packet: Tensor, into: Tensor) -> None:
        into.copy_(packet.view(self.wire_dtype))

    def summands(self, packet: Tensor, dtype: torch.dtype) -> Tensor:
        return packet.view(self.wire_dtype)


@dataclass(frozen=True)
class Half(Cast):
    """float16 on the wire."""

    name = "half"
    summary = "float16"
    wire_dtype = torch.float16

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        entries = packet.view(torch.float16)
        if ops.supports(tensor):
            ops.cast_to_half(tensor, entries, LARGEST_HALF)
            return
        super().encode(memory, tensor, packet)
        entries.clamp_(-LARGEST_HALF, LARGEST_HALF)
        entries[:1] += nan_if_not_finite(tensor)  # the clamp would hide an infinity


@dataclass(frozen=True)
class BFloat16(Cast):
    """bfloat16 on the wire."""

    name = "bfloat16"
    summary = "bfloat16"
    wire_dtype = torch.bfloat16
