"""BFloat16: the range of float32 in 2 bytes an entry, added up as it travels.

An entry is off by at most 2⁻⁸ of itself. A sum over N workers rounds N−1 times more, each time by as much
of what it is so far: with many workers `Half` is finer, if the entries fit its range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.codecs.cast import Cast


@dataclass(frozen=True)
class BFloat16(Cast):
    """bfloat16 on the wire."""

    name = "bfloat16"
    wire_dtype = torch.bfloat16
