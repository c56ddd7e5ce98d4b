"""The table of strategies under test: one line each, and all of this folder's tests run over it.

The tests of the world of processes are here now. Those of the virtual world (a run repeats bit for bit, and
equals the process run; staleness keeps its bound) join as `test_virtual.py`, over the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat import (
    ASP,
    BSP,
    DSSP,
    GSSP,
    OSP,
    SSDSGD,
    SSP,
    Auto,
    DiLoCo,
    ErrorFeedback,
    GDTopK,
    LocalSGD,
    Oscars,
    SelSync,
    SparseLoCo,
    Strategy,
    TopK,
)
from tests.conformance.hand_counts import (
    SAMPLES,
    Count,
    RankCount,
    bsp,
    bsp_topk,
    diloco,
    diloco_served,
    local_sgd,
    local_sgd_moments,
    local_sgd_topk,
    marked_gradients,
    oscars,
    osp,
    selsync,
    served,
    sparse_loco,
    ssd_sgd,
    ssd_sgd_served,
    weights,
)
from tests.support.scripted_auto import ScriptedAuto

AnyStrategy = Strategy[Any]


class Repeats(Enum):
    """How equal two runs of real workers are. A server adds updates in the order in which they come."""

    EXACTLY = auto()
    TO_ROUNDING = auto()
    NOT = auto()  # what a worker reads depends on who was faster


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy at some setting, and what is known of it.

    sent                 bytes one rank sends for (model, steps, world), counted by hand; None: not here
    sent_by_rank         the same for (model, steps, world, rank, optimizer), where it depends on these
    degenerate           the setting at which it equals BSP under plain SGD; None: it has none
    exact                whether it does so bit for bit, or to rounding
    gradients_travel     an overflow in one rank's gradients reaches all of them; or in these steps only
    alone                the setting at which a world of one equals the plain loop, under plain SGD;
                         None: it does at any setting, under any optimizer
    repeats              how equal two runs are; what does not repeat has no count of bytes either
    """

    strategy: AnyStrategy
    sent: Count | None = None
    sent_by_rank: RankCount | None = None
    degenerate: AnyStrategy | None = None
    exact: bool = False
    gradients_travel: bool | frozenset[int] = True
    alone: AnyStrategy | None = None
    repeats: Repeats = Repeats.EXACTLY

    @property
    def count(self) -> RankCount | None:
        """The hand count by rank, if there is one."""
        if self.sent is None:
            return self.sent_by_rank
        of_any = self.sent
        return lambda model, steps, world, rank, optimizer: of_any(model, steps, world)

    def same(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        """Whether two runs ended alike, as far as they can."""
        if self.repeats is Repeats.EXACTLY:
            return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        torch.testing.assert_close(one, other)
        return True


_OSP = OSP(budget=0.9, growth=4)
_CARRIED = SSDSGD(warmup=2, delay=3)
_AUTHORS = SSDSGD(rule="authors", warmup=2, delay=3, staggered=False)
_STREAMING = DiLoCo(period=4, fragments=2, delay=1, mix=0.5, average=0.5)
_GUARDED = DiLoCo(period=4, outer_momentum=0.3, outlier_norm=1e3, outlier_cosine=-1.0)
_EAGER = DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, eager=True)  # momentum: test_eager.py

TABLE = [
    Case(strategy=BSP(), sent=bsp),
    Case(
        strategy=BSP(codec=ErrorFeedback(TopK(0.1))),
        sent=bsp_topk(0.1),
        degenerate=BSP(codec=TopK(1.0)),
        exact=True,
    ),
    Case(
        strategy=LocalSGD(period=3, codec=ErrorFeedback(TopK(0.25))),
        sent=local_sgd_topk(3, 0.25),
        degenerate=LocalSGD(period=1, codec=TopK(1.0)),
        gradients_travel=False,
    ),
    Case(
        strategy=LocalSGD(period=4), sent=local_sgd(4), degenerate=LocalSGD(period=1), gradients_travel=False
    ),
    Case(
        strategy=LocalSGD(period=3, weighted=True),
        sent=local_sgd(3, SAMPLES),
        degenerate=LocalSGD(period=1, weighted=True),
        gradients_travel=False,
    ),
    Case(
        strategy=LocalSGD(period=2, first_moments=3, second_moments=5),
        sent=local_sgd_moments(2, 3, 5),
        degenerate=LocalSGD(period=1, first_moments=1, second_moments=1),
        gradients_travel=False,
    ),
    Case(
        strategy=_STREAMING,
        sent_by_rank=diloco(_STREAMING),
        degenerate=DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0),
        gradients_travel=False,
        alone=DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, fragments=2),
    ),
    Case(
        strategy=_GUARDED,
        sent_by_rank=diloco(_GUARDED),
        degenerate=DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0, outlier_norm=1e3),
        gradients_travel=False,
        alone=DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, outlier_norm=1e3),
    ),
    Case(
        strategy=DiLoCo(period=4, outer_momentum=0.3, on="server"),
        sent=diloco_served(4),
        degenerate=DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0, on="server"),
        gradients_travel=False,
        alone=DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, on="server"),
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(  # a quorum of all, within any time; tests/strategies/diloco/test_quorum.py has smaller ones
        strategy=DiLoCo(period=4, outer_momentum=0.3, on="server", quorum=1000, grace_s=1e6),
        sent=diloco_served(4),
        degenerate=DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0, on="server", grace_s=1e6),
        gradients_travel=False,
        alone=DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, on="server", grace_s=1e6),
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(
        strategy=_EAGER,
        sent_by_rank=diloco(_EAGER),
        gradients_travel=False,
        alone=DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, eager=True),
    ),
    Case(
        strategy=SparseLoCo(period=3, ratio=0.25, chunk=16),  # a chunk in each parameter, so that all move
        sent=sparse_loco(3, 0.25, 16),
        degenerate=SparseLoCo(period=1, ratio=1.0, bits=None),
        gradients_travel=False,
    ),
    Case(
        strategy=SelSync(delta=1.0, window=3, period=2),
        sent=selsync(3, weights, period=2),
        degenerate=SelSync(delta=0.0),
        gradients_travel=False,
    ),
    Case(
        strategy=SelSync(delta=1.0, window=3, aggregate="gradients", late=True),
        sent=selsync(3, marked_gradients),
        degenerate=SelSync(delta=0.0, aggregate="gradients"),
        exact=True,
        gradients_travel=False,
    ),
    Case(
        strategy=_AUTHORS,
        sent_by_rank=ssd_sgd(_AUTHORS),
        degenerate=SSDSGD(rule="authors", warmup=1000, staggered=False),
        exact=True,
        gradients_travel=False,
        alone=SSDSGD(rule="authors", warmup=2, delay=3, alpha=1.0, beta=0.0, staggered=False),
    ),
    Case(
        strategy=_CARRIED,
        sent_by_rank=ssd_sgd(_CARRIED),
        degenerate=SSDSGD(warmup=1000),
        exact=True,
        gradients_travel=False,
    ),
    Case(
        strategy=SSDSGD(on="server", warmup=1, delay=3),
        sent_by_rank=ssd_sgd_served(1, 3),
        degenerate=SSDSGD(on="server", warmup=1000),
        exact=True,
        gradients_travel=False,
    ),
    Case(strategy=_OSP, sent=osp(_OSP), degenerate=OSP(budget=0), exact=True),
    Case(  # tests/virtual/test_osp_served.py counts its bytes
        strategy=OSP(on="server", budget=0.9, growth=4),
        degenerate=OSP(on="server", budget=0),
        exact=True,
    ),
    Case(  # tests/strategies/auto/test_auto.py counts its bytes
        strategy=ScriptedAuto(),
        degenerate=Auto(longest=1),
        exact=True,
        gradients_travel=frozenset({0, 1, 2, 6, 7, 8}),
    ),
    Case(strategy=ASP(), sent=served, gradients_travel=False, repeats=Repeats.NOT),
    Case(
        strategy=SSP(staleness=1, push="update"),  # whose order changes nothing but rounding
        sent=served,
        degenerate=SSP(staleness=0),
        gradients_travel=False,
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(
        strategy=Oscars(
            tau=100, limit=0.03, patience=1e6
        ),  # three steps each, however fast, and none is late
        sent=oscars,
        degenerate=Oscars(tau=1, limit=1, patience=1e6),
        gradients_travel=False,
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(
        strategy=DSSP(low=1, high=4),
        sent=served,
        degenerate=DSSP(low=0, high=0),
        gradients_travel=False,
        repeats=Repeats.NOT,
    ),
    Case(
        strategy=GSSP(groups="0-3", staleness=1, push="update"),
        sent=served,
        degenerate=GSSP(groups="0-3", staleness=0),
        gradients_travel=False,
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(
        strategy=GSSP(groups="0/1-3", sparse=GDTopK(epoch_steps=4)),
        sent=served,
        gradients_travel=False,
        repeats=Repeats.NOT,
        alone=GSSP(sparse=GDTopK(ratio=1.0, answers="full")),
    ),
]
REPEATING = [case for case in TABLE if case.repeats is not Repeats.NOT]
COUNTED = [(case, count) for case in REPEATING if (count := case.count) is not None]

every_case = pytest.mark.parametrize("case", TABLE, ids=[str(case.strategy) for case in TABLE])
every_repeating_case = pytest.mark.parametrize("case", REPEATING, ids=[str(c.strategy) for c in REPEATING])
every_counted_case = pytest.mark.parametrize(
    ("case", "sent"), COUNTED, ids=[str(case.strategy) for case, _ in COUNTED]
)
every_strategy = pytest.mark.parametrize("strategy", [c.strategy for c in TABLE], ids=str)
