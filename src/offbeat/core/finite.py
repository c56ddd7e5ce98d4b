"""Whether numbers are finite, by their sum: one pass over memory, and much faster than to seek the largest.

So is refused what would overflow a sum; no gradient and no update of a training that goes well is near it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all of them are."""
    return all(bool(torch.isfinite(tensor.sum(dtype=WIDE.get(tensor.dtype)))) for tensor in tensors)


def nan_if_not_finite(tensor: Tensor) -> Tensor:
    """0 if all of it is finite, NaN if not: an answer for which nobody waits for a GPU."""
    return tensor.sum(dtype=WIDE.get(tensor.dtype)).mul_(0.0)
