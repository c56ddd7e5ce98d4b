"""Half: IEEE half precision, 2 bytes an entry, added up as it travels.

An entry within ±65504 is off by at most 2⁻¹¹ of itself, or by 2⁻²⁵ where that is more; larger ones become
±65504. A sum over N workers rounds N−1 times more. The mean splittable before it sums, so it does not
overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.cast import Cast
from offbeat.codecs.cuda import ops as kernels
from offbeat.core.finite import nan_if_not_finite

LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Half(Cast):
    """float16 on the wire."""

    name = "half"
    wire_dtype = torch.float16

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        entries = packet.view(torch.float16)
        if kernels.fits(tensor):
            kernels.narrow(tensor, entries, LARGEST)
            return
        super().encode(memory, tensor, packet)
        entries.clamp_(-LARGEST, LARGEST)
        entries[:1] += nan_if_not_finite(tensor)  # an infinity is told as such
