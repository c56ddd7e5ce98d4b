"""The table of strategies under test: one line each, and all of this folder's tests run over it.

The tests of the world of processes are here now. Those of the virtual world (a run repeats bit for bit, and
equals the process run; staleness keeps its bound) join as `test_virtual.py`, over the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import ASP, BSP, DSSP, SSP, LocalSGD, Strategy

AnyStrategy = Strategy[Any]
Count = Callable[[nn.Module, int, int], int]


class Repeats(Enum):
    """How equal two runs of real workers are. A server adds updates in the order in which they come."""

    EXACTLY = auto()
    TO_ROUNDING = auto()
    NOT = auto()  # what a worker reads depends on who was faster


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy at some setting, and what is known of it.

    sent                 bytes one rank sends for (model, steps, world), counted by hand
    degenerate           the setting at which it equals BSP under plain SGD; None: it has none
    exact                whether it does so bit for bit, or to rounding
    gradients_travel     an overflow in one rank's gradients reaches all of them
    repeats              how equal two runs are; what does not repeat has no count of bytes either
    """

    strategy: AnyStrategy
    sent: Count
    degenerate: AnyStrategy | None = None
    exact: bool = False
    gradients_travel: bool = True
    repeats: Repeats = Repeats.EXACTLY

    def same(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        """Whether two runs ended alike, as far as they can."""
        if self.repeats is Repeats.EXACTLY:
            return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        torch.testing.assert_close(one, other)
        return True


# --- hand counts, from shapes alone


def ring(nbytes: int, world: int) -> int:
    """What a ring all-reduce sends out of each NIC."""
    return 2 * nbytes * (world - 1) // world


def weights(model: nn.Module) -> int:
    """The flat weights: every trainable parameter begins at a multiple of 64 bytes."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    return sum((size + 63) // 64 * 64 for size in sizes)


def marked_gradients(model: nn.Module) -> int:
    """The flat gradients, laid out like the weights, and one mark for each parameter."""
    return weights(model) + sum(p.element_size() for p in model.parameters() if p.requires_grad)


def statistics(model: nn.Module) -> int:
    """Floating-point buffers, as they are."""
    return sum(b.numel() * b.element_size() for b in model.buffers() if b.is_floating_point())


def _bsp(model: nn.Module, steps: int, world: int) -> int:
    return steps * ring(marked_gradients(model) + statistics(model), world)


def _local_sgd(period: int, more: int = 0) -> Count:
    """`more`: what else travels when weights do."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        return steps // period * ring(weights(model) + statistics(model) + more, world)

    return sent


def _served(model: nn.Module, steps: int, world: int) -> int:
    """Every rank a host with a shard: all but its own share is pushed, and its shard answers all others. The
    last answers are under way when the loop ends."""
    return (2 * steps - 1) * weights(model) * (world - 1) // world


# --- the table

_SAMPLES = 8  # one float64: the samples that all have seen

TABLE = [
    Case(strategy=BSP(), sent=_bsp),
    Case(
        strategy=LocalSGD(period=4), sent=_local_sgd(4), degenerate=LocalSGD(period=1), gradients_travel=False
    ),
    Case(
        strategy=LocalSGD(period=3, weighted=True),
        sent=_local_sgd(3, _SAMPLES),
        degenerate=LocalSGD(period=1, weighted=True),
        gradients_travel=False,
    ),
    Case(strategy=ASP(), sent=_served, gradients_travel=False, repeats=Repeats.NOT),
    Case(
        strategy=SSP(staleness=1),
        sent=_served,
        degenerate=SSP(staleness=0),
        gradients_travel=False,
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(
        strategy=DSSP(low=1, high=4),
        sent=_served,
        degenerate=DSSP(low=0, high=0),
        gradients_travel=False,
        repeats=Repeats.NOT,
    ),
]
REPEATING = [case for case in TABLE if case.repeats is not Repeats.NOT]

every_case = pytest.mark.parametrize("case", TABLE, ids=[str(case.strategy) for case in TABLE])
every_repeating_case = pytest.mark.parametrize("case", REPEATING, ids=[str(c.strategy) for c in REPEATING])
every_strategy = pytest.mark.parametrize("strategy", [c.strategy for c in TABLE], ids=str)
