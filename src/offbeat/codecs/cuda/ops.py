"""Kernels for a GPU: one pass over memory, where torch's operations would need several.

They are written in Triton, which comes with torch's builds for CUDA. Where it is missing, or entries are not
float32, torch's operations do the same.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

ENTRIES = {8: 2048, 4: 1024, 1: 2048}  # by bits: what a program quantizes. The fastest of some, on an H200
WARPS = 2
BLOCK = 1024  # entries that a program works on, elsewhere


def fits(entries: Tensor) -> bool:
    """Whether these entries can be left to the kernels."""
    known = entries.is_cuda and entries.dtype == torch.float32 and entries.is_contiguous()
    return known and entries.numel() > 0 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def quantize(rows: Tensor, scales: Tensor, codes: Tensor, bits: int, least: float, seed: int | None) -> None:
    """As `Quantize.encode` does; with a seed, stochastic. A row that is no whole chunk comes alone."""
    grid, sizes, shape = _shape(rows, codes, bits)
    _kernel("encode")[grid](
        rows, scales, codes, *sizes, seed or 0, least, **shape, STOCHASTIC=seed is not None
    )


def dequantize(codes: Tensor, scales: Tensor, into: Tensor, bits: int, factor: float, add: bool) -> None:
    """Put what codes stand for, times a factor, in place, or add it."""
    grid, sizes, shape = _shape(into, codes, bits)
    _kernel("decode")[grid](codes, scales, into, *sizes, factor, **shape, ADD=add)


def _shape(rows: Tensor, codes: Tensor, bits: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """The grid; how many rows, bytes of a row and entries of a row; and what the kernel is compiled for."""
    count, length, width = rows.size(0), rows.size(1), codes.size(1)
    padded = 1 << (width - 1).bit_length()
    short = padded * 8 // bits != length
    at_once = 1 if short else max(1, ENTRIES[bits] // length)
    shape = {"BITS": bits, "WIDTH": padded, "ROWS": at_once, "SHORT": short, "num_warps": WARPS}
    return (-(-count // at_once),), (count, width, length), shape


def narrow(entries: Tensor, halves: Tensor, largest: float) -> None:
    """float16 within bounds; what is not finite stays so."""
    _kernel("narrow")[_grid(entries)](entries, halves, entries.numel(), largest, BLOCK=BLOCK)


def pick(entries: Tensor, seed: Tensor, values: Tensor, unbiased: bool) -> None:
    """As `RandomK.encode` does."""
    _kernel("pick")[_grid(values)](
        entries, seed, values, entries.numel(), values.numel(), UNBIASED=unbiased, BLOCK=BLOCK
    )


def put(entries: Tensor, seed: Tensor, values: Tensor, factor: float) -> None:
    """Add what was picked where it came from."""
    _kernel("put")[_grid(values)](entries, seed, values, entries.numel(), values.numel(), factor, BLOCK=BLOCK)


def scatter(
    entries: Tensor, counts: Tensor, values: Tensor, indices: Tensor, page: int, factor: float
) -> None:
    """Add values at indices into pages, of which there are so many in each."""
    ends = counts.cumsum(0, dtype=torch.int64)
    _kernel("scatter")[(counts.numel(),)](
        entries, values, indices, ends, entries.numel(), values.numel(), factor, PAGE=page, BLOCK=BLOCK
    )


def add_up(entries: Tensor, more: Tensor) -> Tensor:
    """Add, and tell of the sum: 0 if all of it is finite."""
    spoilt = torch.zeros(1, device=entries.device)
    _kernel("add_up")[_grid(entries)](entries, more, spoilt, entries.numel(), BLOCK=BLOCK)
    return spoilt


def keep(spoilt: Tensor, entries: Tensor, into: Tensor) -> None:
    """Copy what is finite, or, if `spoilt` is not 0, nothing."""
    _kernel("keep")[_grid(entries)](entries, into, spoilt, entries.numel(), BLOCK=BLOCK)


def _grid(tensor: Tensor) -> tuple[int]:
    return (-(-tensor.numel() // BLOCK),)


def _kernel(name: str) -> Any:
    from offbeat.codecs.cuda import kernels as triton_kernels  # which needs Triton

    return getattr(triton_kernels, name)
