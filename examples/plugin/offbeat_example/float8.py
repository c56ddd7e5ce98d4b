"""Float8: entries as floats of 8 bits, and one scale for all of them.

    s = max |x| / (largest float8)        decoded = s · float8(x / s)

    mantissa 3    an entry is off by at most 2⁻⁴ of itself, or by 2⁻¹⁰ s where that is more
    mantissa 2    by 2⁻³ of itself, or by 2⁻¹⁷ s

The error is never larger than the entry, so `error_feedback(float8)` sends it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from offbeat import Codec
from offbeat.core.fields import Choice

FORMATS = {3: torch.float8_e4m3fn, 2: torch.float8_e5m2}
SCALE = torch.float32
SMALLEST = torch.finfo(SCALE).tiny  # a smaller scale would divide by 0


@dataclass(frozen=True)
class Float8(Codec):
    """A codec that sends 8 bits per entry, `mantissa` of them behind the leading one."""

    name = "float8"
    summary = "floats of 8 bits, and one scale for all of them"

    mantissa: Annotated[int, Choice("bits of the mantissa", of=(3, 2))] = 3

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return SCALE.itemsize + numel

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        scale, entries = self._parts(packet)
        largest = torch.linalg.vector_norm(tensor, torch.inf)  # not finite if an entry is not
        scale.copy_((largest / torch.finfo(entries.dtype).max).clamp_(min=SMALLEST))
        entries.copy_(tensor / scale)

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        scale, entries = self._parts(packet)
        into.add_(entries.to(into.dtype).mul_(scale), alpha=factor)

    def _parts(self, packet: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of a packet's scale and entries."""
        scale, entries = packet.tensor_split([SCALE.itemsize])
        return scale.view(SCALE), entries.view(FORMATS[self.mantissa])
