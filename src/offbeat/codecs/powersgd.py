"""PowerSGD (Vogels et al., 2019): the mean of matrices, projected onto a few common directions.

    M a parameter's gradient as a matrix (its outermost dimension by all others), Q from the last exchange:
    P ← mean of M Q;   P ← orthonormal columns;   Q ← mean of Mᵀ P;   decoded = P Qᵀ

The mean of M, M̄, is decoded as its projection onto P: ‖M̄ − decoded‖ ≤ ‖M̄‖. The error is 0, but for
rounding, where the rank of M̄ is at most `rank` and Q is not orthogonal to any of its directions; the
initial Q is not. For error feedback, a worker's residual is the part of its own M that is orthogonal to P.
Vectors, and matrices that the factors would not make smaller, travel whole, with P.

A packet of one worker alone means nothing, since P belongs to all workers: PowerSGD needs an all-reduce, and
does not work with a server. P and Q are float32; for float64 tensors, float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Stream
from offbeat.core.blocks import Matrix
from offbeat.core.fields import Whole
from offbeat.core.finite import nan_if_not_finite
from offbeat.core.pending import Pending
from offbeat.core.port import Port
from offbeat.errors import OffbeatError

NOISE_SCALE = 1e-18  # far below any gradient, but its square is still a float32


@dataclass
class Factors:
    """The factors of all matrices of a tensor, one after the other."""

    q: Tensor
    matrices: list[Matrix] = field(metadata={"saved": False})
    p: Tensor = field(metadata={"saved": False})  # followed by the matrices that travel whole
    last_q: Tensor = field(metadata={"saved": False})
    noise: Tensor = field(metadata={"saved": False})


@dataclass(frozen=True)
class PowerSGD(Codec):
    """A codec that sends two factors of `rank` columns for each matrix."""

    name = "powersgd"
    summary = "two factors of low rank for each matrix"
    splittable = False

    rank: Annotated[int, Whole("columns of the factors of a matrix", of="columns", at_least=1)] = 4

    def columns(self, matrix: Matrix) -> int:
        """Return how many columns the matrix's factors have; 0: it travels whole."""
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
        noise = torch.randn(tallest, generator=draws, dtype=dtype).mul_(NOISE_SCALE).to(like.device)
        size = sum(m.rows * (self.columns(m) or m.cols) for m in matrices)
        return Factors(q, [*factored, *whole], q.new_empty(size), torch.empty_like(q), noise)

    @property
    def wire_ratio(self) -> float:
        return min(1.0, 2 * self.rank / 1024)  # for a square matrix of a million entries

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        raise OffbeatError("the size of PowerSGD's factors depends on the matrices, not on the entries")

    def encode(self, memory: Any, tensor: Tensor, packet: Tensor) -> None:
        raise OffbeatError("PowerSGD has no packets of one worker alone")

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        raise OffbeatError("PowerSGD has no packets of one worker alone")

    def start(self, stream: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        factors: Factors = stream.memory
        for matrix, p, q in self._matrices(factors, tensor):
            if q is None:
                p.copy_(matrix)
            else:
                torch.mm(q, matrix.to(q.dtype).T, out=p)
        return port.all_reduce(factors.p, lane=stream.lane)

    async def exchange(
        self, stream: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        await sent
        factors: Factors = stream.memory
        factors.last_q.copy_(factors.q)
        for matrix, p, q in self._matrices(factors, tensor):
            if q is not None:
                orthonormalize(p, factors.noise)
                torch.mm(p, matrix.to(q.dtype), out=q)
                if remainder:
                    add_product(p, q, matrix, beta=1, alpha=-1)
            elif remainder:
                matrix.zero_()
        return port.all_reduce(factors.q, lane=stream.lane) if factors.q.numel() else sent

    async def finish(self, stream: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        await sent
        factors: Factors = stream.memory
        for matrix, p, q in self._matrices(factors, into):
            if q is None:
                matrix.copy_(p)
            else:
                add_product(p, q, matrix, beta=0, alpha=1)
        # A gradient that is not finite spoils this mean, but no later one.
        torch.where(nan_if_not_finite(factors.q) == 0, factors.q, factors.last_q, out=factors.q)

    def _matrices(self, factors: Factors, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield each matrix in the tensor, its P (or its copy, if it travels whole), and its Q (or None).

        Columns of P and Q are stored as rows, which a GPU multiplies fastest.
        """
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


def add_product(p: Tensor, q: Tensor, into: Tensor, *, beta: float, alpha: float) -> None:
    """Compute into ← β into + α P Qᵀ, in place."""
    if into.dtype == p.dtype:
        into.addmm_(p.T, q, beta=beta, alpha=alpha)
    else:
        into.copy_(torch.addmm(into.to(p.dtype), p.T, q, beta=beta, alpha=alpha))


def orthonormalize(columns: Tensor, noise: Tensor) -> None:
    """Orthonormalize columns by Gram and Schmidt, each twice: for so few, faster than a QR on a GPU.

    A column that is 0, or in the span of those before it, must still become a direction of its own: if
    it stayed 0, so would its column of Q, forever. So `noise` is added first, far below any gradient."""
    columns.add_(noise[: columns.numel()].view_as(columns))
    for number, column in enumerate(columns):
        before = columns[:number]
        for _ in range(2 if number else 0):
            column.addmv_(before.T, before @ column, alpha=-1)
        column.div_(torch.linalg.vector_norm(column))
