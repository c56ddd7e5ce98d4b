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

from offbeat import ASP, BSP, DSSP, OSP, SSDSGD, SSP, LocalSGD, Oscars, SelSync, Strategy
from offbeat.replica import cut, trainable_bytes

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

    sent                 bytes one rank sends for (model, steps, world), counted by hand; None: not here
    degenerate           the setting at which it equals BSP under plain SGD; None: it has none
    exact                whether it does so bit for bit, or to rounding
    gradients_travel     an overflow in one rank's gradients reaches all of them
    alone                the setting at which a world of one equals the plain loop, under plain SGD;
                         None: it does at any setting, under any optimizer
    repeats              how equal two runs are; what does not repeat has no count of bytes either
    """

    strategy: AnyStrategy
    sent: Count | None = None
    degenerate: AnyStrategy | None = None
    exact: bool = False
    gradients_travel: bool = True
    alone: AnyStrategy | None = None
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


def _selsync(window: int, layout: Callable[[nn.Module], int]) -> Count:
    """`layout`: what travels in the window; after it only flags, as long as no gradient changes enough."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        full, asked = min(steps, window), max(0, steps - window)
        return full * ring(layout(model) + statistics(model), world) + asked * ring(_FLAG, world)

    return sent


def even_shares(model: nn.Module, world: int) -> tuple[int, int]:
    """Of each kind of parameters, a share's bytes of weights, and of marks: one for each piece in a share.

    Parameters lie in backward order. Shares are of one size, in steps of 64 bytes, and so are their marks.
    """
    nbytes = marks = 0
    for dtype in {p.dtype for p in model.parameters()}:
        ends, total = [], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad and p.dtype == dtype]):
            ends.append((total, total + p.numel() * p.element_size()))
            total += (p.numel() * p.element_size() + 63) // 64 * 64
        share = (total // 64 + world - 1) // world * 64
        pieces = [sum(a < (k + 1) * share and b > k * share for a, b in ends) for k in range(world)]
        nbytes += share
        marks += max(pieces) * dtype.itemsize
    return nbytes, marks


def _ssd_sgd(warmup: int, delay: int) -> Count:
    """A push every step; a pull in the step after each period, and statistics in the step that uses it."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        later = max(0, steps - warmup)
        share, marks = even_shares(model, world)
        pulls, used = max(0, later - 1) // delay, max(0, later - 2) // delay
        out = later * (share + marks) + pulls * share
        return (
            _bsp(model, min(steps, warmup), world) + (world - 1) * out + used * ring(statistics(model), world)
        )

    return sent


def _osp(strategy: OSP) -> Count:
    """As BSP, in two parts; and, in steps 2, 10, 18 and so on, two numbers and one a block, of 8 bytes."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        grain = strategy.grain(trainable_bytes(model))
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        blocks = cut(trained, *grain, strategy.apart(model))
        return _bsp(model, steps, world) + -(-(steps - 1) // 8) * ring(8 * (2 + len(blocks)), world)

    return sent


def _served(model: nn.Module, steps: int, world: int) -> int:
    """Every rank a host with a shard: all but its own share is pushed, and its shard answers all others. The
    last answers are under way when the loop ends."""
    return (2 * steps - 1) * weights(model) * (world - 1) // world


def _in_lock_step(model: nn.Module, steps: int, world: int) -> int:
    """As above, but every answer has come."""
    return 2 * steps * weights(model) * (world - 1) // world


def _ssd_sgd_served(warmup: int, delay: int) -> Count:
    """As `_served`; a push waits for all that was asked for before, and the last but one has come."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        later = max(0, steps - warmup)
        return (
            (steps + min(steps, warmup) + max(0, later - 2) // delay) * weights(model) * (world - 1) // world
        )

    return sent


# --- the table

_FLAG = 4  # one float32
_SAMPLES = 8  # one float64: the samples that all have seen
_OSP = OSP(budget=0.9, growth=4)
_LOCK_STEP = Oscars(tau=1, limit=1, patience=1e6)  # one step a round, and nobody is late

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
    Case(
        strategy=SelSync(delta=1.0, window=3),
        sent=_selsync(3, weights),
        degenerate=SelSync(delta=0.0),
        gradients_travel=False,
    ),
    Case(
        strategy=SelSync(delta=1.0, window=3, aggregate="gradients", late=True),
        sent=_selsync(3, marked_gradients),
        degenerate=SelSync(delta=0.0, aggregate="gradients"),
        exact=True,
        gradients_travel=False,
    ),
    Case(
        strategy=SSDSGD(warmup=2, delay=3),
        sent=_ssd_sgd(2, 3),
        degenerate=SSDSGD(warmup=1000),
        exact=True,
        gradients_travel=False,
        alone=SSDSGD(warmup=2, delay=3, alpha=1.0, beta=0.0),
    ),
    Case(
        strategy=SSDSGD(on="server", warmup=1, delay=3),
        sent=_ssd_sgd_served(1, 3),
        degenerate=SSDSGD(on="server", warmup=1000),
        exact=True,
        gradients_travel=False,
        alone=SSDSGD(on="server", warmup=1, delay=3, alpha=1.0, beta=0.0),
    ),
    Case(strategy=_OSP, sent=_osp(_OSP), degenerate=OSP(budget=0), exact=True),
    Case(  # tests/virtual/test_osp_served.py counts its bytes
        strategy=OSP(on="server", budget=0.9, growth=4),
        degenerate=OSP(on="server", budget=0),
        exact=True,
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
        strategy=Oscars(),
        sent=_served,
        degenerate=_LOCK_STEP,
        gradients_travel=False,
        repeats=Repeats.NOT,
    ),
    Case(
        strategy=_LOCK_STEP,
        sent=_in_lock_step,
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
COUNTED = [(case, case.sent) for case in REPEATING if case.sent is not None]

every_case = pytest.mark.parametrize("case", TABLE, ids=[str(case.strategy) for case in TABLE])
every_repeating_case = pytest.mark.parametrize("case", REPEATING, ids=[str(c.strategy) for c in REPEATING])
every_counted_case = pytest.mark.parametrize(
    ("case", "sent"), COUNTED, ids=[str(case.strategy) for case, _ in COUNTED]
)
every_strategy = pytest.mark.parametrize("strategy", [c.strategy for c in TABLE], ids=str)
