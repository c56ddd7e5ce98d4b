"""Quantize: 8, 4 or 1 bit an entry, and one scale for each chunk of entries.

    8, 4 bit      s = max |x| of a chunk, step = s/127 or s/7    |x − decoded| ≤ step/2, in each entry
    1 bit         the sign, times the mean |x| of a chunk        ‖x − decoded‖² = ‖x‖² − ‖x‖₁²/n, of a chunk
    stochastic    up or down by chance, the expectation is x     |x − decoded| ≤ step
                  with 1 bit the sign is drawn, times s          |x − decoded| ≤ 2s

Each to the rounding of float32. Chunks are of 1024 entries, with 4 bits of 128: with these, and
stochastic rounding, less is lost in expectation than was there (E‖x − decoded‖² ≤ ‖x‖²·n/4(2^(bits−1) −
1)²), so errors can be fed back. With 1 bit and drawn signs they cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.codecs.codec import Codec, Matrix
from offbeat.codecs.randomk import Draws
from offbeat.errors import SettingError

CHUNK = {8: 1024, 4: 128, 1: 1024}
LEAST = torch.finfo(torch.float32).tiny  # smaller steps count as none: they would be too coarse
PIECE = 1 << 15  # entries worked on together: they stay in the cache. On a GPU, all


@dataclass(frozen=True)
class Quantize(Codec):
    """`bits` bits an entry: 8, 4 or 1."""

    name = "quantize"

    bits: int = 8
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.bits not in CHUNK or isinstance(self.bits, bool):
            raise SettingError(f"bits={self.bits!r}: 8, 4 or 1 bit an entry")

    @property
    def contracts(self) -> bool:
        return not (self.stochastic and self.bits == 1)

    @property
    def levels(self) -> int:
        """Steps on each side of 0."""
        return (1 << self.bits - 1) - 1

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> Draws:
        return Draws()

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        whole, rest = divmod(numel, CHUNK[self.bits])
        codes = whole * CHUNK[self.bits] * self.bits // 8 + -(-rest * self.bits // 8)
        return (whole + bool(rest)) * _wide(dtype).itemsize + codes

    def encode(self, memory: Draws, tensor: Tensor, packet: Tensor) -> None:
        memory.count += 1
        noise = torch.Generator(tensor.device).manual_seed(memory.count) if self.stochastic else None
        for entries, scales, codes in self._pieces(tensor, packet):
            entries = entries.to(scales.dtype)
            low, high = torch.aminmax(entries, dim=1, keepdim=True)
            top = torch.maximum(high, low.neg_())
            if self.bits == 1:
                torch.mean(entries.abs(), dim=1, keepdim=True, out=scales) if noise is None else scales.copy_(
                    top
                )
                scales.add_(top * 0)  # what is not finite is told
                digits = self._signs(entries, top, noise)
            else:
                torch.div(top, self.levels, out=scales)
                scales[scales < LEAST] = 0
                digits = self._digits(entries, scales, noise)
            self._pack(digits, codes)

    def _digits(self, entries: Tensor, scales: Tensor, noise: torch.Generator | None) -> Tensor:
        """From 0 to twice the levels: cut off after half a step was added, or a part of one by chance."""
        steps = entries / torch.where(scales == 0, 1.0, scales)
        if noise is None:
            return steps.add_(self.levels + 0.5)
        drawn = torch.rand(entries.shape, generator=noise, dtype=steps.dtype, device=steps.device)
        return steps.add_(self.levels).add_(drawn).clamp_(max=2 * self.levels)

    def _signs(self, entries: Tensor, top: Tensor, noise: torch.Generator | None) -> Tensor:
        if noise is None:
            return entries >= 0
        drawn = torch.rand(entries.shape, generator=noise, dtype=entries.dtype, device=entries.device)
        return drawn.mul_(2).sub_(1).mul_(top) < entries  # a number between −s and s

    def _pack(self, digits: Tensor, codes: Tensor) -> None:
        """The first of a row's digits into the lowest bits of its bytes, the next into the next bits."""
        if self.bits == 8:
            codes.copy_(digits)
            return
        width = codes.size(1)
        codes.zero_()
        for number, part in enumerate(digits.to(torch.uint8).split(width, dim=1)):
            codes[:, : part.size(1)] |= part << self.bits * number

    def _unpack(self, codes: Tensor, columns: int) -> Tensor:
        if self.bits == 8:
            return codes
        digits = [(codes >> self.bits * n) & ((1 << self.bits) - 1) for n in range(8 // self.bits)]
        return torch.cat(digits, dim=1)[:, :columns]

    def add(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        for entries, scales, codes in self._pieces(into, packet):
            digits = self._unpack(codes, entries.size(1)).to(scales.dtype)
            digits = digits.mul_(2).sub_(1) if self.bits == 1 else digits.sub_(self.levels)
            if entries.dtype == scales.dtype:
                entries.addcmul_(digits, scales, value=factor)
            else:
                entries.add_(digits.mul_(scales), alpha=factor)

    def _pieces(self, tensor: Tensor, packet: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of a chunk each, their scales, and their codes; the last row may be a shorter one."""
        chunk, dtype = CHUNK[self.bits], _wide(tensor.dtype)
        whole, rest = divmod(tensor.numel(), chunk)
        bytes_of_scales = (whole + bool(rest)) * dtype.itemsize
        scales = packet[:bytes_of_scales].view(dtype).unsqueeze(1)
        codes = packet[bytes_of_scales:]
        width = chunk * self.bits // 8
        rows = tensor[: whole * chunk].view(whole, chunk)
        packed = codes[: whole * width].view(whole, width)
        at_once = whole if tensor.is_cuda else PIECE // chunk
        for low in range(0, whole, max(1, at_once)):
            part = slice(low, min(whole, low + at_once))
            yield rows[part], scales[part], packed[part]
        if rest:
            yield tensor[whole * chunk :].unsqueeze(0), scales[whole:], codes[whole * width :].unsqueeze(0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Scales, and the arithmetic, are of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32
