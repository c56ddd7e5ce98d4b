"""RandomK: one entry of each of k even slices, drawn anew each time; all others count as 0.

    k = ratio · n, rounded, at least 1;   E‖x − decoded‖² ≤ (1 − 1/⌈n/k⌉) ‖x‖²

All workers draw the same entries, from a count that they share, so only values are sent, and packets can be
added up; a packet to a server starts with the count. With `unbiased`, an entry is multiplied by the length of
its slice: the expectation is then x itself, but the error may be larger than x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from offbeat.codecs.base import Sparse
from offbeat.codecs.cuda import ops
from offbeat.core.blocks import Matrix
from offbeat.core.fields import Flag
from offbeat.core.finite import nan_if_not_finite

SEED_BYTES = 8


@dataclass
class DrawCount:
    """The number of encodings so far, which seeds the draws."""

    count: int = 0


@dataclass(frozen=True)
class RandomK(Sparse):
    """A codec that sends the fraction `ratio` of the entries, drawn at random."""

    name = "randomk"
    summary = "entries drawn at random"
    summable = True

    unbiased: Annotated[bool, Flag("scale entries up so that their expectation is the tensor itself")] = False

    @property
    def contractive(self) -> bool:
        return not self.unbiased

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> DrawCount:
        return DrawCount()

    def memory_at(self, count: int) -> DrawCount:
        return DrawCount(count)

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return SEED_BYTES + self.count(numel) * dtype.itemsize

    def encode(self, memory: DrawCount, tensor: Tensor, packet: Tensor) -> None:
        memory.count += 1
        seed = packet[:SEED_BYTES].view(torch.int64).fill_(memory.count)
        values = self.summands(packet, tensor.dtype)
        if ops.supports(tensor):
            ops.gather_drawn(tensor, seed, values, self.unbiased)
        else:
            starts, widths = slices(tensor.numel(), values.numel(), tensor.device)
            torch.index_select(tensor, 0, starts + draw(seed, widths), out=values)
            if self.unbiased:
                values *= widths
        values[:1] += nan_if_not_finite(tensor)

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        values = self.summands(packet, into.dtype)
        seed = packet[:SEED_BYTES].view(torch.int64)
        if ops.supports(into):
            ops.add_drawn(into, seed, values, factor)
            return
        starts, widths = slices(into.numel(), values.numel(), into.device)
        into.index_add_(0, starts + draw(seed, widths), values, alpha=factor)

    def summands(self, packet: Tensor, dtype: torch.dtype) -> Tensor:
        return packet[SEED_BYTES:].view(dtype)


def slices(numel: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where `count` even slices of a tensor start, and how long they are, on the device."""
    ends = torch.arange(count + 1, device=device) * numel // count
    return ends[:-1], torch.diff(ends)


def draw(seed: Tensor, widths: Tensor) -> Tensor:
    """Draw a number below each width, by a hash of seed and position: the same on every device."""
    bits = torch.arange(widths.numel(), device=widths.device) + seed * 0x9E3779B97F4A7C1
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):  # wraps round at 64 bits
        bits = (bits ^ (bits >> 29)) * factor
    return ((bits ^ (bits >> 32)) & 0x7FFFFFFF) % widths
