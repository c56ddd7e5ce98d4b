"""PowerSGD (Vogels et al., 2019): the mean of matrices, seen through a few directions that all workers
share.

    M a parameter's gradient as a matrix (its outermost dimension by all others), Q from the last time:
    P ← mean of M Q;   P ← orthonormal columns;   Q ← mean of Mᵀ P;   decoded = P Qᵀ

The mean of M, M̄, is decoded as its projection onto P: ‖M̄ − decoded‖ ≤ ‖M̄‖, and to rounding 0 where the rank
of M̄ is at most `rank` and Q has met all of its directions, as the Q to start with has. What a worker's
own M loses, for error feedback, is its own part beside P. Vectors, and matrices that the factors would
not make smaller, travel whole, with P.

A packet of one worker alone means nothing, since P is of all: so this needs a mean to travel in, and no
server takes it. P and Q are float32, of float64 float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Matrix, Stream
from offbeat.core.finite import nan_if_not_finite
from offbeat.core.pending import Pending
from offbeat.core.port import Port
from offbeat.errors import OffbeatError, SettingError

GRAIN = 1e-18  # its square is still a float32


@dataclass
class Factors:
    """Of all matrices of a tensor, one after the other."""

    q: Tensor
    matrices: list[Matrix] = field(metadata={"saved": False})
    p: Tensor = field(metadata={"saved": False})  # and what travels whole
    last_q: Tensor = field(metadata={"saved": False})
    grain: Tensor = field(metadata={"saved": False})


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Two factors of `rank` columns for each matrix."""

    name = "powersgd"
    splittable = False

    rank: int = 4

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise SettingError(f"rank={self.rank!r}: a whole number of columns, at least 1")

    def columns(self, matrix: Matrix) -> int:
        """How many columns its factors have; 0: it travels whole."""
        rank = min(self.rank, matrix.rows, matrix.cols)
        return rank if (matrix.rows + matrix.cols) * rank < matrix.rows * matrix.cols else 0

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> Factors:
        if not matrices:
            raise OffbeatError("PowerSGD needs to know which matrices a tensor is made of")
        factored = [m for m in matrices if self.columns(m)]
        whole = [m for m in matrices if not self.columns(m)]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        size = sum(m.cols * self.columns(m) for m in factored)
        draws = torch.Generator().manual_seed(size)  # the same for all workers
        q = torch.randn(size, generator=draws, dtype=dtype).to(like.device)
        tallest = max((m.rows * self.columns(m) for m in factored), default=0)
        grain = torch.randn(tallest, generator=draws, dtype=dtype).mul_(GRAIN).to(like.device)
        size = sum(m.rows * (self.columns(m) or m.cols) for m in matrices)
        return Factors(q, [*factored, *whole], q.new_empty(size), torch.empty_like(q), grain)

    @property
    def wire_ratio(self) -> float:
        return min(1.0, 2 * self.rank / 1024)  # of a square matrix of a million entries

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        raise OffbeatError("the size of PowerSGD's factors follows from the matrices, not from their number")

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        raise OffbeatError("PowerSGD has no packets of one worker alone")

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        raise OffbeatError("PowerSGD has no packets of one worker alone")

    def start(self, wire: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        factors: Factors = wire.memory
        for matrix, p, q in self._parts(factors, tensor):
            if q is None:
                p.copy_(matrix)
            else:
                torch.mm(q, matrix.to(q.dtype).T, out=p)
        return port.all_reduce(factors.p, lane=wire.lane)

    async def exchange(
        self, wire: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        await sent
        factors: Factors = wire.memory
        factors.last_q.copy_(factors.q)
        for matrix, p, q in self._parts(factors, tensor):
            if q is not None:
                orthonormalize(p, factors.grain)
                torch.mm(p, matrix.to(q.dtype), out=q)
                if remainder:
                    product(p, q, matrix, beta=1, alpha=-1)
            elif remainder:
                matrix.zero_()
        return port.all_reduce(factors.q, lane=wire.lane) if factors.q.numel() else sent

    async def finish(self, wire: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        await sent
        factors: Factors = wire.memory
        for matrix, p, q in self._parts(factors, into):
            if q is None:
                matrix.copy_(p)
            else:
                product(p, q, matrix, beta=0, alpha=1)
        # What was not finite is to spoil this mean, but none after it.
        torch.where(nan_if_not_finite(factors.q) == 0, factors.q, factors.last_q, out=factors.q)

    def _parts(self, factors: Factors, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Each matrix in the tensor, its P (or itself, as it travels whole), and its Q. Their columns are
        rows here: so a GPU multiplies them fastest."""
        p_end = q_end = 0
        for matrix in factors.matrices:
            rows, cols, rank = matrix.rows, matrix.cols, self.columns(matrix)
            view = tensor[matrix.offset : matrix.offset + rows * cols].view(rows, cols)
            p = factors.p[p_end : p_end + rows * (rank or cols)]
            p_end += p.numel()
            if rank:
                yield view, p.view(rank, rows), factors.q[q_end : q_end + cols * rank].view(rank, cols)
                q_end += cols * rank
            else:
                yield view, p.view(rows, cols), None


def product(p: Tensor, q: Tensor, into: Tensor, *, beta: float, alpha: float) -> None:
    """into ← β into + α P Qᵀ, where it lies."""
    if into.dtype == p.dtype:
        into.addmm_(p.T, q, beta=beta, alpha=alpha)
    else:
        into.copy_(torch.addmm(into.to(p.dtype), p.T, q, beta=beta, alpha=alpha))


def orthonormalize(columns: Tensor, grain: Tensor) -> None:
    """Gram and Schmidt's way, each column twice before it is scaled: on a GPU faster than a QR of so few.

    A column that is 0, or in the span of those before it, becomes a direction of its own all the same: were
    it left 0, so would its column of Q be, and it would never find a direction again. For that, `grain` is
    added first: numbers far below any gradient's."""
    columns.add_(grain[: columns.numel()].view_as(columns))
    for number, column in enumerate(columns):
        before = columns[:number]
        for _ in range(2 if number else 0):
            column.addmv_(before.T, before @ column, alpha=-1)
        column.div_(torch.linalg.vector_norm(column))
