"""Kernels for a GPU: quantizing in one pass over memory, where torch's operations would need five.

They are written in Triton, which comes with torch's builds for CUDA. Where it is missing, or entries are not
float32, torch's operations do the same.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

ENTRIES = {8: 1024, 4: 2048, 1: 4096}  # by bits: what a program works on. The fastest of some, on an H200


def fits(rows: Tensor) -> bool:
    """Whether these entries, rows of a chunk each, can be left to the kernels."""
    known = rows.is_cuda and rows.dtype == torch.float32 and rows.is_contiguous()
    return known and rows.numel() > 0 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def quantize(rows: Tensor, scales: Tensor, codes: Tensor, bits: int, least: float, seed: int | None) -> None:
    """As `Quantize.encode` does; with a seed, stochastic."""
    at_once = ENTRIES[bits] // rows.size(1)
    _kernel("encode")[(-(-rows.size(0) // at_once),)](
        rows,
        scales,
        codes,
        rows.size(0),
        seed or 0,
        least,
        BITS=bits,
        WIDTH=codes.size(1),
        ROWS=at_once,
        STOCHASTIC=seed is not None,
    )


def dequantize(codes: Tensor, scales: Tensor, into: Tensor, bits: int, factor: float, add: bool) -> None:
    """Put what codes stand for, times a factor, in place, or add it."""
    at_once = ENTRIES[bits] // into.size(1)
    _kernel("decode")[(-(-into.size(0) // at_once),)](
        codes,
        scales,
        into,
        into.size(0),
        factor,
        BITS=bits,
        WIDTH=codes.size(1),
        ROWS=at_once,
        ADD=add,
    )


def _kernel(name: str) -> Any:
    from offbeat.codecs import triton_kernels  # which needs Triton

    return getattr(triton_kernels, name)
