"""Under every strategy, every loop is right (equal to an independent reference) or refused in words."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from tests.conformance.loop_kinds import LOOPS, Loop, batches, of_groups
from tests.conformance.loop_table import ROWS, Row
from tests.support import loops
from tests.support.limits import HANG_S

STEPS = 6
Outcome = tuple[dict[str, Tensor], int] | str  # the published weights and the steps, or the refusal
# Sums of float64 in another order, through a few steps of a small network.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}

every_row = pytest.mark.parametrize("name", ROWS)


def loop_of(row: Row, name: str) -> Loop:
    """The loop, with the optimizers of the row in place of those of the plain loop."""
    loop, usual = LOOPS[name], LOOPS["plain"].optimizers
    if row.optimizers is usual or (loop.optimizers is not usual and loop.like != "plain"):
        return loop
    many = loop.optimizers is not usual
    return replace(loop, optimizers=of_groups(row.optimizers) if many else row.optimizers)


def _take_turns(running: Iterator[None], in_turn: bool) -> None:
    """Step; where ranks take turns, rank 1 after rank 0."""
    ended = False
    while not ended:
        if in_turn and dist.get_rank() == 1:
            dist.barrier()
        ended = next(running, "ended") == "ended"
        if in_turn and dist.get_rank() == 0:
            dist.barrier()
        if in_turn:
            dist.barrier()


def _run(row: Row, name: str) -> Outcome:
    rank, loop = dist.get_rank(), loop_of(row, name)
    model = loop.model(rank)
    optimizers = loop.optimizers(model)
    try:
        with offbeat.attach(model, optimizers, row.strategy, timeout_s=HANG_S) as sync:
            _take_turns(loop.run(model, optimizers, batches(rank, STEPS), sync), row.in_turn)
            sync.settle()  # ends the last step, where one of two optimizers takes no part in it
            steps = sync.metrics.steps
    except offbeat.OffbeatError as refusal:
        return str(refusal)
    return loops.tensors(model), steps


def _all_loops(name: str) -> dict[str, Outcome]:
    outcomes = {loop: _run(ROWS[name], loop) for loop in LOOPS}
    gc.freeze()  # each attach would search what torch.compile leaves behind for wrappers of a model
    return outcomes


@every_row
def test_every_loop_is_right_or_refused(crew, name: str) -> None:
    row = ROWS[name]
    ours, theirs = crew(2).run(_all_loops, name)
    wrong = {loop: why for loop in LOOPS if (why := _wrong(row, loop, ours, theirs))}
    assert not wrong, "\n".join(f"{loop}: {why}" for loop, why in wrong.items())


def _wrong(row: Row, name: str, ours: dict[str, Outcome], theirs: dict[str, Outcome]) -> str:
    """Return what is wrong with a loop; empty: it is right, or refused as the table says."""
    outcome, there = ours[name], theirs[name]
    refusal = row.refused.get(name)
    if refusal is not None:
        told = all(isinstance(each, str) and refusal in each for each in (outcome, there))
        return "" if told else f"not refused by {refusal!r} on both ranks: {_short(outcome)}, {_short(there)}"
    if isinstance(outcome, str) or isinstance(there, str):
        return f"refused: {_short(outcome)}, {_short(there)}"
    if not loops.equal(outcome[0], there[0]):
        return "the ranks hold different models after the loop"
    loop = loop_of(row, name)
    steps = 2 * STEPS if name == "networks in turn" else STEPS
    if not outcome[1] == there[1] == steps:
        return f"{outcome[1]} and {there[1]} steps were counted, not {steps}"
    if name in row.differs:
        return ""
    own = ours[loop.like or name]
    assert not isinstance(own, str)
    if loop.exact and row.exact and not loops.equal(outcome[0], own[0]):
        return f"is not bit for bit the {loop.like} loop"
    expected = own[0]
    if row.reference is not None:
        expected = loops.tensors(row.reference(loop_of(row, loop.like or name), 2, STEPS))
    try:
        torch.testing.assert_close(outcome[0], expected, **CLOSE)
    except AssertionError as differs:
        return f"differs from its reference: {differs}".replace("\n", " ")
    return ""


def _short(outcome: Any) -> str:
    return repr(outcome) if isinstance(outcome, str) else "it ran"
