"""Operations on a GPU by kernels of our own: one pass over memory, where torch's operations need several.

The kernels are written in Triton, which comes with torch's builds for CUDA. Where Triton is missing, or
entries are not float32, codecs use torch's operations, with the same results.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# Entries that a program quantizes, by bits: the fastest numbers of those tried on an H200.
ENTRIES = {8: 2048, 4: 1024, 1: 2048}
WARPS = 2
BLOCK = 1024  # entries that a program of any other kernel works on


def supports(entries: Tensor) -> bool:
    """Return whether the kernels can work on these entries."""
    known = entries.is_cuda and entries.dtype == torch.float32 and entries.is_contiguous()
    return known and entries.numel() > 0 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def quantize(rows: Tensor, scales: Tensor, codes: Tensor, bits: int, least: float, seed: int | None) -> None:
    """Quantize rows as `Quantize.encode` does; with a seed, stochastically. A short row is passed alone."""
    grid, sizes, shape = _shape(rows, codes, bits)
    _kernel("encode")[grid](
        rows, scales, codes, *sizes, seed or 0, least, **shape, STOCHASTIC=seed is not None
    )


def dequantize(codes: Tensor, scales: Tensor, into: Tensor, bits: int, factor: float, add: bool) -> None:
    """Decode the codes, times `factor`, into `into`, or add them to it."""
    grid, sizes, shape = _shape(into, codes, bits)
    _kernel("decode")[grid](codes, scales, into, *sizes, factor, **shape, ADD=add)


def _shape(rows: Tensor, codes: Tensor, bits: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, Any]]:
    """Return the grid; the number of rows, of bytes and entries per row; and the compile-time constants."""
    count, length, width = rows.size(0), rows.size(1), codes.size(1)
    padded = 1 << (width - 1).bit_length()
    short = padded * 8 // bits != length
    at_once = 1 if short else max(1, ENTRIES[bits] // length)
    shape = {"BITS": bits, "WIDTH": padded, "ROWS": at_once, "SHORT": short, "num_warps": WARPS}
    return (-(-count // at_once),), (count, width, length), shape


def cast_to_half(entries: Tensor, halves: Tensor, largest: float) -> None:
    """Convert to float16, clamped to ±largest; infinities and NaNs stay."""
    _kernel("cast_to_half")[_grid(entries)](entries, halves, entries.numel(), largest, BLOCK=BLOCK)


def gather_drawn(entries: Tensor, seed: Tensor, values: Tensor, unbiased: bool) -> None:
    """Copy the entries that `RandomK.encode` draws to `values`."""
    _kernel("gather_drawn")[_grid(values)](
        entries, seed, values, entries.numel(), values.numel(), UNBIASED=unbiased, BLOCK=BLOCK
    )


def add_drawn(entries: Tensor, seed: Tensor, values: Tensor, factor: float) -> None:
    """Add `values`, times `factor`, to the entries that `gather_drawn` copied."""
    _kernel("add_drawn")[_grid(values)](
        entries, seed, values, entries.numel(), values.numel(), factor, BLOCK=BLOCK
    )


def add_paged(
    entries: Tensor, counts: Tensor, values: Tensor, indices: Tensor, page: int, factor: float
) -> None:
    """Add `values`, times `factor`, at indices coded by page (see `index_coding.py`)."""
    ends = counts.cumsum(0, dtype=torch.int64)
    _kernel("add_paged")[(counts.numel(),)](
        entries, values, indices, ends, entries.numel(), values.numel(), factor, PAGE=page, BLOCK=BLOCK
    )


def add_and_check(entries: Tensor, addend: Tensor) -> Tensor:
    """Add `addend` to `entries`; return one number on the GPU, 0 if all sums are finite."""
    not_finite = torch.zeros(1, device=entries.device)
    _kernel("add_and_check")[_grid(entries)](entries, addend, not_finite, entries.numel(), BLOCK=BLOCK)
    return not_finite


def copy_if_finite(not_finite: Tensor, entries: Tensor, into: Tensor) -> None:
    """Copy the finite entries; none at all if `not_finite` is not 0."""
    _kernel("copy_if_finite")[_grid(entries)](entries, into, not_finite, entries.numel(), BLOCK=BLOCK)


def _grid(tensor: Tensor) -> tuple[int]:
    return (-(-tensor.numel() // BLOCK),)


def _kernel(name: str) -> Any:
    from offbeat.codecs.cuda import kernels  # here, since it needs Triton

    return getattr(kernels, name)
