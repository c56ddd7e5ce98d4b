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

from offbeat import (
    ASP,
    BSP,
    DSSP,
    GSSP,
    OSP,
    SSDSGD,
    SSP,
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
from offbeat.core.blocks import block_sizes, make_blocks, trainable_bytes

AnyStrategy = Strategy[Any]
Count = Callable[[nn.Module, int, int], int]
RankCount = Callable[[nn.Module, int, int, int, str], int]  # and the optimizer's name


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
    gradients_travel     an overflow in one rank's gradients reaches all of them
    alone                the setting at which a world of one equals the plain loop, under plain SGD;
                         None: it does at any setting, under any optimizer
    repeats              how equal two runs are; what does not repeat has no count of bytes either
    """

    strategy: AnyStrategy
    sent: Count | None = None
    sent_by_rank: RankCount | None = None
    degenerate: AnyStrategy | None = None
    exact: bool = False
    gradients_travel: bool = True
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


def topk_of_blocks(model: nn.Module, ratio: float) -> int:
    """A packet for each block: k values, each with an index of 2 bytes, and a count of 4 bytes for every
    65,536 entries where there are more than these."""
    nbytes = 0
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for block in make_blocks(trained, *block_sizes(trainable_bytes(model))):
        count = max(1, round(ratio * block.numel))
        pages = -(-block.numel // 65536) if block.numel > 65536 else 0
        nbytes += count * (block.params[0].element_size() + 2) + 4 * pages
    return nbytes


def _bsp_topk(ratio: float) -> Count:
    """Packets to all others, and the largest of one mark a parameter."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        marks = 4 * sum(p.requires_grad for p in model.parameters())
        dense = ring(marks, world) + ring(statistics(model), world)
        return steps * ((world - 1) * topk_of_blocks(model, ratio) + dense)

    return sent


def _local_sgd_topk(period: int, ratio: float) -> Count:
    def sent(model: nn.Module, steps: int, world: int) -> int:
        packets = (world - 1) * topk_of_blocks(model, ratio)
        return steps // period * (packets + ring(statistics(model), world))

    return sent


def _sparse_loco(period: int, ratio: float, chunk: int) -> Count:
    """A packet to each of the others: k entries per chunk, with indices of a byte and values of 2 bits; and a
    scale of 4 bytes, or a float64's 8, for every 1024 of them."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        nbytes = 0
        trained = [p for p in model.parameters() if p.requires_grad]
        for dtype in {p.dtype for p in trained}:
            sizes = [p.numel() * dtype.itemsize for p in trained if p.dtype == dtype]
            numel = sum((size + 63) // 64 * 64 for size in sizes) // dtype.itemsize
            whole, rest = divmod(numel, chunk)
            count = whole * max(1, round(ratio * chunk)) + (max(1, round(ratio * rest)) if rest else 0)
            full, left = divmod(count, 1024)
            nbytes += count + max(4, dtype.itemsize) * -(-count // 1024) + 256 * full + -(-left // 4)
        return steps // period * ((world - 1) * nbytes + ring(statistics(model), world))

    return sent


def _local_sgd(period: int, more: int = 0) -> Count:
    """`more`: what else travels when weights do."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        return steps // period * ring(weights(model) + statistics(model) + more, world)

    return sent


def _diloco(strategy: DiLoCo) -> RankCount:
    """Fragments in turn, each an even part of the weights of a kind, in steps of 64 bytes. A fragment goes to
    its owners, who have even parts of it, `delay` steps before its turn, and comes back in half that time.
    Statistics go with the last."""
    of, every = strategy.fragments, strategy.period // strategy.fragments

    def turns(steps_ahead: int) -> list[int]:
        return [turn % of for turn in range(steps_ahead // every)]

    def sent(model: nn.Module, steps: int, world: int, rank: int, optimizer: str) -> int:
        there, back = turns(steps + strategy.delay), turns(steps + strategy.delay // 2)
        total = 0
        for dtype in {p.dtype for p in model.parameters()}:
            lines = sum(
                (p.numel() * p.element_size() + 63) // 64
                for p in model.parameters()
                if p.requires_grad and p.dtype == dtype
            )
            sizes = [lines * (i + 1) // of - lines * i // of for i in range(of)]
            owned = [n * (rank + 1) // world - n * rank // world for n in sizes]
            total += 64 * sum(sizes[i] - owned[i] for i in there)
            total += 64 * sum((world - 1) * owned[i] for i in back)
        return total + there.count(of - 1) * ring(statistics(model), world)

    return sent


def _selsync(window: int, layout: Callable[[nn.Module], int], period: int = 1) -> Count:
    """`layout`: what travels in the window; after it only flags, as long as no gradient changes enough."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        full, asked = min(steps, window), max(0, steps - window) // period
        return full * ring(layout(model) + statistics(model), world) + asked * ring(_FLAG, world)

    return sent


Pieces = list[tuple[int, int]]


def even_shares(model: nn.Module, world: int) -> list[tuple[int, int, Pieces]]:
    """For each kind of parameters the bytes of an element and of a share, and where each parameter lies.

    Parameters lie in backward order. Shares are of one size, in whole lines of 64 bytes.
    """
    shares = []
    for dtype in {p.dtype for p in model.parameters()}:
        ends, total = [], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad and p.dtype == dtype]):
            ends.append((total, total + p.numel() * p.element_size()))
            total += (p.numel() * p.element_size() + 63) // 64 * 64
        shares.append((dtype.itemsize, (total // 64 + world - 1) // world * 64, ends))
    return shares


def _cut(pieces: Pieces, start: int, stop: int) -> list[int]:
    """The bytes of each parameter between two places."""
    return [min(b, stop) - max(a, start) for a, b in pieces if a < stop and b > start]


STATE = {"sgd": (0, 0), "momentum": (1, 0), "adamw": (2, 1)}  # tensors and counters of a parameter


def _ssd_sgd(strategy: SSDSGD) -> RankCount:
    """A push every step, with a mark a piece, as many in each share; in each step but the first a part of a
    pull, 0 in the step after a period, then the next, as far as there are parts; and statistics in the step
    that uses part 0. With each piece of a parameter travels its state, in whole lines; then a mark and the
    counters of all pieces, of 8 bytes; all workers send as much as the one with the most. The authors' rule
    pulls a part of the weights as it lies."""
    delay, parts, authors = strategy.delay, strategy.parts, strategy.rule == "authors"

    def sent(model: nn.Module, steps: int, world: int, rank: int, optimizer: str) -> int:
        later = max(0, steps - strategy.warmup)
        tensors, counters = STATE[optimizer]
        out = 0
        for itemsize, share, pieces in even_shares(model, world):
            marks = max(len(_cut(pieces, k * share, (k + 1) * share)) for k in range(world))
            out += later * (share + marks * itemsize)

            def parcel(start: int, stop: int, pieces: Pieces = pieces) -> int:
                sizes = _cut(pieces, start, stop)
                numbers = 8 * len(sizes) * (1 + counters) if tensors else 0
                return (1 + tensors) * sum(map(_lines, sizes)) + _lines(numbers)

            for turn in [t % delay for t in range(1, later) if t % delay < parts]:
                start, stop = (share // 64 * n // parts * 64 for n in (turn, turn + 1))
                spans = [(start + k * share, stop + k * share) for k in range(world)]
                out += stop - start if authors else max(parcel(*span) for span in spans)
        used = max(0, later - (1 if authors else 2)) // delay
        warm_up = _bsp(model, min(steps, strategy.warmup), world)
        return warm_up + (world - 1) * out + used * ring(statistics(model), world)

    return sent


def _lines(nbytes: int) -> int:
    return (nbytes + 63) // 64 * 64


def _osp(strategy: OSP) -> Count:
    """As BSP, in two parts; and, in steps 2, 10, 18 and so on, two numbers and one a block, of 8 bytes."""

    def sent(model: nn.Module, steps: int, world: int) -> int:
        layout = strategy.layout(model)
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        blocks = make_blocks(trained, layout.first_bytes, layout.block_bytes, layout.isolate)
        return _bsp(model, steps, world) + -(-(steps - 1) // 8) * ring(8 * (2 + len(blocks)), world)

    return sent


def _served(model: nn.Module, steps: int, world: int) -> int:
    """Every rank a host with a shard: all but its own share is pushed, and its shard answers all others. The
    last answers are under way when the loop ends."""
    return (2 * steps - 1) * weights(model) * (world - 1) // world


def _oscars(model: nn.Module, steps: int, world: int) -> int:
    """As above, with every answer; one step at a time until all are timed, in the third, and then three."""
    rounds = min(steps, 3) + max(0, steps - 3) // 3
    return 2 * rounds * weights(model) * (world - 1) // world


def _ssd_sgd_served(warmup: int, delay: int) -> RankCount:
    """As `_served`; a push waits for all that was asked for before, and the last but one has come. With each
    pull comes the optimizer's state, counters as long as the weights; so with the last one of the warm-up."""

    def sent(model: nn.Module, steps: int, world: int, rank: int, optimizer: str) -> int:
        later, state = max(0, steps - warmup), sum(STATE[optimizer])
        pulled = min(steps, warmup) + state * (0 < warmup <= steps)
        pulled += (1 + state) * (max(0, later - 2) // delay)
        return (steps + pulled) * weights(model) * (world - 1) // world

    return sent


# --- the table

_FLAG = 4  # one float32
_SAMPLES = 8  # one float64: the samples that all have seen
_OSP = OSP(budget=0.9, growth=4)
_CARRIED = SSDSGD(warmup=2, delay=3)
_AUTHORS = SSDSGD(rule="authors", warmup=2, delay=3, staggered=False)
_STREAMING = DiLoCo(period=4, fragments=2, delay=1, mix=0.5, average=0.5)

TABLE = [
    Case(strategy=BSP(), sent=_bsp),
    Case(
        strategy=BSP(codec=ErrorFeedback(TopK(0.1))),
        sent=_bsp_topk(0.1),
        degenerate=BSP(codec=TopK(1.0)),
        exact=True,
    ),
    Case(
        strategy=LocalSGD(period=3, codec=ErrorFeedback(TopK(0.25))),
        sent=_local_sgd_topk(3, 0.25),
        degenerate=LocalSGD(period=1, codec=TopK(1.0)),
        gradients_travel=False,
    ),
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
        strategy=_STREAMING,
        sent_by_rank=_diloco(_STREAMING),
        degenerate=DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0),
        gradients_travel=False,
        alone=DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0, fragments=2),
    ),
    Case(
        strategy=SparseLoCo(period=3, ratio=0.25, chunk=16),  # a chunk in each parameter, so that all move
        sent=_sparse_loco(3, 0.25, 16),
        degenerate=SparseLoCo(period=1, ratio=1.0, bits=None),
        gradients_travel=False,
    ),
    Case(
        strategy=SelSync(delta=1.0, window=3, period=2),
        sent=_selsync(3, weights, period=2),
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
        strategy=_AUTHORS,
        sent_by_rank=_ssd_sgd(_AUTHORS),
        degenerate=SSDSGD(rule="authors", warmup=1000, staggered=False),
        exact=True,
        gradients_travel=False,
        alone=SSDSGD(rule="authors", warmup=2, delay=3, alpha=1.0, beta=0.0, staggered=False),
    ),
    Case(
        strategy=_CARRIED,
        sent_by_rank=_ssd_sgd(_CARRIED),
        degenerate=SSDSGD(warmup=1000),
        exact=True,
        gradients_travel=False,
    ),
    Case(
        strategy=SSDSGD(on="server", warmup=1, delay=3),
        sent_by_rank=_ssd_sgd_served(1, 3),
        degenerate=SSDSGD(on="server", warmup=1000),
        exact=True,
        gradients_travel=False,
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
        strategy=Oscars(
            tau=100, limit=0.03, patience=1e6
        ),  # three steps each, however fast, and none is late
        sent=_oscars,
        degenerate=Oscars(tau=1, limit=1, patience=1e6),
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
    Case(
        strategy=GSSP(groups="0-3", staleness=1),
        sent=_served,
        degenerate=GSSP(groups="0-3", staleness=0),
        gradients_travel=False,
        repeats=Repeats.TO_ROUNDING,
    ),
    Case(
        strategy=GSSP(groups="0/1-3", sparse=GDTopK(epoch_steps=4)),
        sent=_served,
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
