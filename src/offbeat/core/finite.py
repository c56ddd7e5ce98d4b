"""Checks for numbers that are not finite, by their sum: one pass over memory, much faster than a maximum.

Finite numbers whose sum overflows count as not finite, too; in healthy training no gradient or update comes
near such a sum.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable

import torch
from torch import Tensor

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements of all tensors are finite."""
    return all(cmath.isfinite(tensor.sum(dtype=WIDER.get(tensor.dtype)).item()) for tensor in tensors)


def nan_if_not_finite(tensor: Tensor) -> Tensor:
    """Return a tensor of 0 if all elements are finite, else of NaN, without waiting for a GPU."""
    return tensor.sum(dtype=WIDER.get(tensor.dtype)).mul_(0.0)
