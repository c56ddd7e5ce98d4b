"""Cohorts: workers that are alike, computed together. One session trains all of them, by the same strategy.

    w = (w_1, …, w_n), one row for each worker;   every operation is on all rows at once

A strategy whose layout is `rowwise`, an optimizer that is elementwise and an all-reduce over all rows compute
for each row what they would compute for that worker alone. Workers whose steps always take equally long start
and wait at the same times. So weights and measurements are the same to the bit, and a step costs one
coroutine and some calls of torch, instead of as many for each worker.

Workers are alike if they are neighbours in the same group of the cluster, with a constant step time, and the
same slowdowns. Absent workers, and random step times, make no cohorts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableSequence, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.ledger import Ledger, Span, WorkerTotals
from offbeat.core.optimizer import OptimizerView
from offbeat.core.overrides import promises
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Op, Signature
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.core.validation import unwrap
from offbeat.errors import OffbeatError
from offbeat.worlds.virtual.cluster import Cluster
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.looking import Lookout
from offbeat.worlds.virtual.port import VirtualPort
from offbeat.worlds.virtual.session import VirtualSession

T = TypeVar("T")

StackedGradient = Callable[[nn.Module, Any, range, int], Tensor]
"""A function of a model with one row per worker, the first worker's batch, the ranks and the step.

It adds each worker's gradient to its row of `grad`, and returns the first worker's loss, detached.
"""


def find_cohorts(
    cluster: Cluster, strategy: Strategy[Any], model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> list[range] | None:
    """Return the cohorts of a cluster, by their ranks; None where they change a result, or save nothing."""
    stackable = (
        strategy.layout(model).rowwise
        and promises(type(strategy), "layout", "init", "ready", "step", "drain", "publish")
        and strategy.server_half() is None
        and OptimizerView(*unwrap(optimizers)).elementwise
        and all(param.requires_grad for param in model.parameters())
        and not list(model.buffers())
    )
    if not stackable or cluster.away:
        return None
    slow = [frozenset(slowdown.workers) for slowdown in cluster.slow]

    def speed(rank: int) -> Hashable:
        """Return a key that is the same for workers whose steps always take equally long."""
        group = cluster.group_of(rank)
        return (group, *(rank in ranks for ranks in slow)) if isinstance(group.step_s, float) else rank

    alike = [list(ranks) for _, ranks in groupby(range(cluster.size), speed)]
    return [range(ranks[0], ranks[-1] + 1) for ranks in alike] if len(alike) < cluster.size else None


class CohortSession(VirtualSession):
    """The training of a cohort. To the loop it is the session of the cohort's first worker."""

    def __init__(
        self,
        ranks: range,
        first: nn.Module,
        stacked: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        strategy: Strategy[Any],
        gradient: StackedGradient,
        cluster: Cluster,
        collectives: dict[Lane, CollectiveQueue],
        lookout: Lookout,
        **options: Any,
    ) -> None:
        """Join the first worker's model, and another that gets one row per worker, with its optimizers."""
        self.ranks = ranks
        self._members: list[Ledger] = []
        super().__init__(
            ranks[0],
            stacked,
            optimizers,
            strategy,
            lambda _, batch: gradient(stacked, batch, ranks, self._step),
            cluster,
            collectives,
            lookout,
            **options,
        )
        self.model = first
        for param, rows in zip(first.parameters(), stacked.parameters(), strict=True):
            param.data = rows.data[0]

    @property
    def ledgers(self) -> list[Ledger]:
        if not self._members:
            self._members = [self.ledger, *(MemberLedger(rank, self.ledger) for rank in self.ranks[1:])]
        return self._members

    def _make_port(self, collectives: dict[Lane, CollectiveQueue]) -> VirtualPort:
        return CohortPort(self.rank, collectives, self.ledger)

    def _lay_out(self, replica: Replica) -> None:
        """Give each flat tensor, and each parameter in it, one row per worker."""
        for index, (flat, blocks) in enumerate(
            zip(replica.weights, replica.flat_groups().values(), strict=True)
        ):
            rows = flat.expand(len(self.ranks), -1).clone()
            replica.weights[index] = rows
            for block, part in zip(blocks, rows.split([b.numel for b in blocks], -1), strict=True):
                block.weight = part
                for param, view in zip(block.params, block.views(part), strict=True):
                    param.data = view


class CohortPort(VirtualPort):
    """The port of a cohort: its first worker's, whose tensors have one row per worker of the cohort.

    A vector stands for equal values of all workers. Only their maximum is sure to be the same value.
    """

    def _start(self, signature: Signature, tensors: Sequence[Tensor], value: T, lane: Lane) -> Pending[T]:
        operation, detail, _ = signature
        tensor = tensors[0]
        if operation not in ("all_reduce", "broadcast") or (tensor.dim() == 1 and detail != Op.MAX.value):
            raise OffbeatError(
                f"a strategy that says it is rowwise calls {operation} {detail}, which workers cannot do as "
                "rows of one tensor: let `rowwise` of its layout be False"
            )
        rows = tensor[None] if tensor.dim() == 1 else tensor
        signature = Signature(operation, detail, (rows[0].nbytes,))
        return super()._start(signature, [rows], value, lane)


class MemberLedger(Ledger):
    """The ledger of a worker in a cohort: that of the first one, but for the bytes that leave its own NIC."""

    def __init__(self, rank: int, first: Ledger) -> None:
        self._first = first
        super().__init__(rank, first.clock)

    @property
    def spans(self) -> MutableSequence[Span] | None:
        return self._first.spans

    @spans.setter
    def spans(self, spans: MutableSequence[Span] | None) -> None:
        """Leave the spans to the first worker's ledger."""

    def sent(self, nbytes: int, left_host: int | None = None) -> None:
        if not self._first.is_paused:
            super().sent(nbytes, left_host)

    def totals(self) -> WorkerTotals:
        return replace(
            self._first.totals(),
            rank=self.rank,
            bytes_sent=self.bytes_sent,
            bytes_left_host=self.bytes_left_host,
        )
