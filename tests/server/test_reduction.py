"""Reductions by a server: in the order of workers, of all participants, each once."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from offbeat.core.port import Op
from offbeat.server.messages import Reduce
from offbeat.server.reduction import ServerReduce, ordered_sum


def reducing(*workers: int) -> ServerReduce:
    reductions = ServerReduce()
    for worker in workers:
        reductions.join(worker, new=True)
    return reductions


def sent(
    reductions: ServerReduce, worker: int, number: int, value: float, op: Op = Op.SUM
) -> dict[int, float]:
    """Add a worker's number; return the result for each worker that gets one now."""
    reductions.add(Reduce(worker=worker, number=number, op=op, tensor=torch.tensor([value])))
    return {reply.worker: reply.tensor.item() for reply in reductions.replies()}


@pytest.mark.parametrize(("op", "total"), [(Op.SUM, [6.0, 9.0]), (Op.MEAN, [2.0, 3.0]), (Op.MAX, [3.0, 6.0])])
def test_sums_by_hand(op: Op, total: list[float]) -> None:
    terms = [torch.tensor(values) for values in ([1.0, 6.0], [2.0, 3.0], [3.0, 0.0])]
    result = ordered_sum(terms, op, 3)
    torch.testing.assert_close(result, torch.tensor(total))
    assert result is terms[0], "in the memory of the first"


def test_the_sum_does_not_depend_on_which_worker_was_first() -> None:
    """1e8 + 1 − 1e8 is 0 or 1 in float32, by the order."""
    values = {0: 1e8, 1: 1.0, 2: -1e8}
    totals = set()
    for order in permutations(values):
        reductions = reducing(0, 1, 2)
        *early, last = (sent(reductions, worker, 1, values[worker]) for worker in order)
        assert early == [{}, {}]
        totals.add(tuple(last.values()))
    assert totals == {(0.0, 0.0, 0.0)}


def test_the_next_reduction_may_begin_before_and_is_answered_after() -> None:
    reductions = reducing(0, 1)
    assert sent(reductions, 0, 1, 1.0) == sent(reductions, 0, 2, 10.0) == {}
    assert sent(reductions, 1, 2, 20.0) == {}, "number 1 is not complete"
    assert reductions.completed == 0
    reductions.add(Reduce(worker=1, number=1, op=Op.SUM, tensor=torch.tensor([2.0])))
    replies = [(reply.number, reply.worker, reply.tensor.item()) for reply in reductions.replies()]
    assert replies == [(1, 0, 3.0), (1, 1, 3.0), (2, 0, 30.0), (2, 1, 30.0)]
    assert not reductions.expects(0, 2) and reductions.expects(0, 3)
    assert sent(reductions, 0, 1, 5.0) == {}, "none is made twice"


def test_a_worker_that_left_is_not_waited_for_and_its_tensor_still_counts() -> None:
    reductions = reducing(0, 1, 2)
    sent(reductions, 2, 1, 4.0)
    sent(reductions, 0, 1, 1.0)
    reductions.leave(2)
    assert sent(reductions, 1, 1, 1.0) == {0: 6.0, 1: 6.0}
    assert not reductions.expects(2, 2)


def test_a_new_worker_has_no_part_after_the_first_reduction_but_one_that_returns_has() -> None:
    reductions = reducing(0, 1)
    reductions.leave(1)
    assert sent(reductions, 0, 1, 1.0) == {0: 1.0}
    reductions.join(7, new=True)
    assert sent(reductions, 7, 2, 9.0) == {} and not reductions.expects(7, 2)
    reductions.join(1, new=False)
    assert sent(reductions, 0, 2, 1.0) == {}
    assert sent(reductions, 1, 2, 2.0) == {0: 3.0, 1: 3.0}


def test_a_restart_counts_from_the_beginning() -> None:
    reductions = reducing(0)
    sent(reductions, 0, 1, 1.0)
    reductions.restart()
    assert reductions.completed == 0
    assert sent(reductions, 0, 1, 2.0) == {0: 2.0}


@pytest.mark.parametrize("op", Op)
def test_what_is_not_finite_stays_so(op: Op) -> None:
    assert math.isnan(ordered_sum([torch.tensor([math.nan]), torch.tensor([1.0])], op, 2).item())
