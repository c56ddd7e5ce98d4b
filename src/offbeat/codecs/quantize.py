"""Quantize: 8, 4, 2 or 1 bit per entry, and one scale per chunk of entries.

    8, 4 bit      s = max |x| of a chunk, step = s/127 or s/7    |x − decoded| ≤ step/2, in each entry
    2 bit         ±a or ±3a, the nearer; a = ⅝ mean |x|          ‖x − decoded‖² ≤ ‖x‖² − 55/64 ‖x‖₁²/n
    1 bit         the sign, times the mean |x| of a chunk        ‖x − decoded‖² = ‖x‖² − ‖x‖₁²/n, of a chunk
    stochastic    up or down by chance, the expectation is x     |x − decoded| ≤ step
                  with 1 bit the sign is drawn, times s          |x − decoded| ≤ 2s

Each up to the rounding of float32. A chunk has 1024 entries, with 4 bits 128: so stochastic rounding is
contractive in expectation (E‖x − decoded‖² ≤ ‖x‖²·n/4(2^(bits−1) − 1)²), and errors can be fed back. With 1
bit and drawn signs it is not. With 2 bits nothing is drawn; the four levels are those that suit a normal
distribution, and the bound is that of ±a alone. On a GPU, 2 bits are computed by torch's operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from offbeat.codecs.cuda import ops
from offbeat.codecs.randomk import DrawCount
from offbeat.codecs.two_phase import TwoPhaseCodec
from offbeat.core.blocks import Matrix
from offbeat.core.fields import Choice, Flag
from offbeat.errors import SettingError

BITS = (8, 4, 2, 1)
CHUNK = {8: 1024, 4: 128, 2: 1024, 1: 1024}
NEAR = 0.625  # of the mean magnitude: the smaller level of 2 bits
SMALLEST_STEP = torch.finfo(torch.float32).tiny  # smaller steps count as 0: they would be too coarse
PIECE = 1 << 18  # entries processed together on a CPU: they stay in the cache


@dataclass(frozen=True)
class Quantize(TwoPhaseCodec):
    """A codec that sends `bits` bits per entry: 8, 4, 2 or 1."""

    name = "quantize"
    summary = "8, 4, 2 or 1 bit per entry, and a scale per chunk of entries"

    bits: Annotated[int, Choice("bits per entry", of=BITS)] = 8
    stochastic: Annotated[bool, Flag("round up or down at random, so that the expectation is right")] = False

    def check(self) -> None:
        if self.stochastic and self.bits == 2:
            raise SettingError("stochastic rounding with 2 bits: use 8, 4 or 1, or stochastic=False")

    @property
    def contractive(self) -> bool:
        return not (self.stochastic and self.bits == 1)

    @property
    def grain(self) -> int:
        return CHUNK[self.bits]

    @property
    def levels(self) -> int:
        """The number of steps on each side of 0."""
        return (1 << self.bits - 1) - 1

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> DrawCount:
        return DrawCount()

    def memory_at(self, count: int) -> DrawCount:
        return DrawCount(count)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        whole, rest = divmod(numel, CHUNK[self.bits])
        codes = whole * CHUNK[self.bits] * self.bits // 8 + -(-rest * self.bits // 8)
        return (whole + bool(rest)) * _wide(dtype).itemsize + codes

    def encode(self, memory: DrawCount, tensor: Tensor, packet: Tensor) -> None:
        self._encode(memory, tensor, packet, residual=False)

    def encode_residual(self, memory: DrawCount, tensor: Tensor, packet: Tensor) -> None:
        self._encode(memory, tensor, packet, residual=True)

    def _encode(self, memory: DrawCount, tensor: Tensor, packet: Tensor, residual: bool) -> None:
        memory.count += 1
        noise = torch.Generator(tensor.device).manual_seed(memory.count) if self.stochastic else None
        for entries, scales, codes in self._pieces(tensor, packet):
            if self._has_kernel(entries):
                ops.quantize(
                    entries,
                    scales,
                    codes,
                    self.bits,
                    SMALLEST_STEP,
                    memory.count if self.stochastic else None,
                )
            elif self.bits == 2:
                self._pack(self._nearest_of_four(entries.to(scales.dtype), scales), codes)
            elif self.bits == 1:
                self._pack(self._signs(entries.to(scales.dtype), scales, noise), codes)
            else:
                steps = self._steps(entries.to(scales.dtype), scales, noise)
                if residual:  # now, while the steps are at hand: unpacking takes half as long as packing
                    _add_steps(entries, steps, scales, -1.0)
                self._pack(steps, codes)
                continue
            if residual:
                self._add(entries, scales, codes, -1.0)

    def _has_kernel(self, entries: Tensor) -> bool:
        return self.bits != 2 and ops.supports(entries)

    def _nearest_of_four(self, entries: Tensor, scales: Tensor) -> Tensor:
        """Return codes from 0 to 3: the sign, times 2, and whether 3a is nearer than a."""
        sizes = entries.abs()
        scales.copy_(sizes.mean(1, keepdim=True).mul_(NEAR))
        return (entries >= 0).to(torch.int8).mul_(2).add_(sizes >= 2 * scales)

    def _signs(self, entries: Tensor, scales: Tensor, noise: torch.Generator | None) -> Tensor:
        if noise is None:
            scales.copy_(entries.abs().mean(1, keepdim=True))
            return entries >= 0
        scales.copy_(_largest(entries))
        return entries >= draw_between(entries, noise).mul_(2).sub_(1).mul_(scales)

    def _steps(self, entries: Tensor, scales: Tensor, noise: torch.Generator | None) -> Tensor:
        """Return the entries in whole steps, up to `levels` on each side of 0."""
        torch.div(_largest(entries), self.levels, out=scales)
        too_small = scales < SMALLEST_STEP
        steps = entries / scales.masked_fill_(too_small, 0).masked_fill(too_small, 1)
        if noise is None:
            return steps.round_()
        return steps.add_(draw_between(entries, noise)).floor_().clamp_(-self.levels, self.levels)

    def _pack(self, steps: Tensor, codes: Tensor) -> None:
        """Pack steps: the first of a row into the lowest bits of its bytes, the next into the next bits."""
        if self.bits == 8:
            codes.view(torch.int8).copy_(steps)
            return
        digits = steps.to(torch.int8)  # torch converts to int8 6x faster than to uint8
        if self.bits == 4:
            digits.add_(self.levels)
        first, *others = digits.view(torch.uint8).split(codes.size(1), dim=1)
        codes.copy_(first)
        for number, part in enumerate(others, 1):
            codes[:, : part.size(1)].add_(part, alpha=1 << self.bits * number)

    def _unpack(self, codes: Tensor, into: Tensor) -> Tensor:
        """Unpack what `_pack` packed."""
        if self.bits == 8:
            return into.copy_(codes.view(torch.int8))
        mask, last = (1 << self.bits) - 1, 8 // self.bits - 1
        for number, part in enumerate(into.split(codes.size(1), dim=1)):
            digits = codes >> self.bits * number if number else codes
            steps = (digits & mask if number < last else digits).view(torch.int8)
            if self.bits == 2:
                steps = (steps & 1).mul_(2).add_(1).mul_((steps & 2).sub_(1))
            elif self.bits == 1:
                steps = steps.mul_(2).sub_(1)
            else:
                steps = steps.sub_(self.levels)
            part.copy_(steps[:, : part.size(1)])
        return into

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        for entries, scales, codes in self._pieces(into, packet):
            self._add(entries, scales, codes, factor)

    def _add(self, entries: Tensor, scales: Tensor, codes: Tensor, factor: float) -> None:
        if self._has_kernel(entries):
            ops.dequantize(codes, scales, entries, self.bits, factor, add=True)
            return
        steps = self._unpack(codes, torch.empty_like(entries, dtype=scales.dtype))
        _add_steps(entries, steps, scales, factor)

    def decode(self, packet: Tensor, into: Tensor) -> None:
        for entries, scales, codes in self._pieces(into, packet):
            if self._has_kernel(entries):
                ops.dequantize(codes, scales, entries, self.bits, 1.0, add=False)
            elif entries.dtype == scales.dtype:
                self._unpack(codes, entries).mul_(scales)
            else:
                entries.copy_(self._unpack(codes, torch.empty_like(entries, dtype=scales.dtype)).mul_(scales))

    def _pieces(self, tensor: Tensor, packet: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield rows of one chunk each, their scales and their codes; the last row may be shorter."""
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


def _largest(entries: Tensor) -> Tensor:
    """Return the largest magnitude of each row."""
    return torch.maximum(entries.amax(1, keepdim=True), entries.amin(1, keepdim=True).neg_())


def _add_steps(entries: Tensor, steps: Tensor, scales: Tensor, factor: float) -> None:
    if entries.dtype == scales.dtype:
        entries.addcmul_(steps, scales, value=factor)
    else:
        entries.add_(steps * scales, alpha=factor)


def draw_between(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a number between 0 and 1 for each entry; on a CPU with 16 bits, four per random integer."""
    if like.is_cuda:
        return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64)
    bits.random_(-(1 << 63), None, generator=generator)
    drawn = bits.view(torch.int16)[: like.numel()].view(like.shape).to(like.dtype)
    return drawn.add_(32768.5).mul_(1 / 65536)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of scales and of the arithmetic."""
    return torch.float64 if dtype == torch.float64 else torch.float32
