"""Exchanges among a roster: when they end, on whom, and what is left of one that is broken off."""

from __future__ import annotations

import pytest
import torch

from offbeat.core.ledger import Ledger
from offbeat.core.port import Lane, Signature
from offbeat.worlds.virtual.elastic.exchanges import Exchanges, RosterQueue
from offbeat.worlds.virtual.elastic.life import Life
from offbeat.worlds.virtual.scheduler import Event
from tests.support.lives import lives_of, run, work
from tests.support.virtual_runs import ring_s

pytestmark = pytest.mark.virtual

NUMEL = 750_000  # 3 MB: an all-reduce of 3 workers takes 4 s


def started() -> tuple[RosterQueue, list[Life], list[Event[None]], list[list[torch.Tensor]]]:
    lives, three = lives_of(3)
    ledgers = [Ledger(rank, lives.scheduler.clock) for rank in range(3)]
    queue = RosterQueue(Lane.FRONT, lives.scheduler, ledgers, three)
    joined = [[torch.full((NUMEL,), float(rank))] for rank in range(3)]
    signature = Signature("all_reduce", "sum", (joined[0][0].nbytes,))
    results = [queue.join(rank, signature, joined[rank], None) for rank in range(3)]
    return queue, three, results, joined


def ended_at(life: Life, results: list[Event[None]], time_s: float, *events: object) -> list[bool]:
    ended: list[float] = []
    run(life, work(life, time_s, ended), *events)  # type: ignore[arg-type]
    return [result.done() for result in results]


def test_exchange_ends_on_all_at_once() -> None:
    _, lives, results, joined = started()
    sent = [tensor for (tensor,) in joined]
    assert ring_s(sent[0].nbytes, 3) == 4.0
    assert ended_at(lives[0], results, 3.9) == [False] * 3
    assert ended_at(lives[0], results, 4.1) == [True] * 3
    assert all(float(result[0]) == 3.0 for (result,) in joined)
    assert [float(tensor[0]) for tensor in sent] == [0.0, 1.0, 2.0], "it could not be sent again"


@pytest.mark.parametrize("happens", ["hang", "cut"])
def test_exchange_with_a_worker_that_is_silent_ends_on_some_until_it_continues(happens: str) -> None:
    _, lives, results, joined = started()
    silence = (1.0, lambda: getattr(lives[0], happens)(6.0))
    assert ended_at(lives[2], results, 6.9, silence) == [False, True, False]
    assert ended_at(lives[2], results, 7.1) == [True] * 3
    assert all(float(result[0]) == 3.0 for (result,) in joined), "added twice"


def test_exchange_that_a_death_breaks_off_ends_on_some_and_leaves_the_network() -> None:
    queue, lives, results, _ = started()

    def die() -> None:
        lives[0].end()
        queue.on_death()

    assert ended_at(lives[2], results, 9.0, (1.0, die)) == [False, True, False]
    assert queue.scheduler.network.load().sum() == 0


def test_exchange_that_is_abandoned_ends_on_nobody_and_counts_until_then() -> None:
    queue, lives, results, _ = started()
    assert ended_at(lives[0], results, 9.0, (1.0, queue.abandon)) == [False] * 3
    assert [ledger.usage().communicate_s for ledger in queue.ledgers] == [1.0] * 3
    late = queue.join(0, Signature("all_reduce", "sum", (4,)), [torch.ones(1)], None)
    assert not late.done()
    assert queue.ledgers[0].usage().communicate_s == 1.0


def test_a_death_looks_at_the_queues_of_open_epochs_alone() -> None:
    """Else each of many thousand deaths looks at the queues of all epochs that there have ever been."""
    lives, three = lives_of(3)
    ledgers = [Ledger(rank, lives.scheduler.clock) for rank in range(3)]
    exchanges = Exchanges(lives.scheduler, ledgers, lives)
    names = [life.name for life in three]
    queues = [exchanges.queue(f"epoch/{number}", Lane.FRONT, names) for number in range(4)]
    for queue in queues[:3]:
        queue.abandon()
    exchanges.on_death(three[0])
    assert exchanges._open == queues[3:]
    assert exchanges.queue("epoch/1", Lane.FRONT, names) is queues[1], "one that comes late finds it closed"
