"""Cast: entries in a narrower number format, which can still be added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offbeat.codecs.base import Codec


@dataclass(frozen=True)
class Cast(Codec):
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
