"""Elastic lanes: what is a batch, and when workers may be admitted. Schedules are in test_membership.py."""

from __future__ import annotations

import pytest

from offbeat.core.pending import block_on
from offbeat.core.port import Lane
from offbeat.errors import OffbeatError, RankLost
from tests.support.membership import SimulatedExchange, SimulatedWorker, Stage


def alone() -> SimulatedWorker:
    """A worker in a roster of its own."""
    stage = Stage(rounds=1, founders=1, minimum=1)
    stage.add_worker()
    (worker,) = stage.workers
    worker.close()
    block_on(worker.lanes.join(worker._receive))
    return worker


def exchange(worker: SimulatedWorker, name: str, lane: Lane) -> None:
    worker.lanes.start(SimulatedExchange(name, lane, worker), lane)


def test_batch_is_all_that_the_lane_has_started() -> None:
    worker = alone()
    for name in ("a", "b"):
        exchange(worker, name, Lane.FRONT)
    exchange(worker, "c", Lane.BACK)
    block_on(worker.lanes.commit(Lane.FRONT))
    assert [entry.exchange for entry in worker.log] == ["a", "b"]
    block_on(worker.lanes.commit(Lane.BACK))
    assert [entry.exchange for entry in worker.log] == ["a", "b", "c"]
    assert worker.stage.registry.counts["votes/1/front"] == 1, "one vote, however many operations"


def test_exchange_that_fails_is_redone_in_the_next_epoch() -> None:
    worker = alone()
    exchange(worker, "a", Lane.FRONT)
    exchange(worker, "b", Lane.BACK)
    worker.stage.broken.add(worker.name)
    block_on(worker.lanes.commit(Lane.FRONT))
    block_on(worker.lanes.commit(Lane.BACK))
    assert [(entry.exchange, entry.epoch) for entry in worker.log] == [("a", 2), ("b", 2)]
    assert worker.lanes.changes == 2


def test_lane_is_connected_when_a_result_of_it_is_first_awaited() -> None:
    worker = alone()
    exchange(worker, "a", Lane.FRONT)
    exchange(worker, "b", Lane.BACK)
    assert not worker.opened and not worker.numbers, "nothing is launched yet"
    block_on(worker.lanes.commit(Lane.FRONT))
    assert worker.opened == {Lane.FRONT}
    exchange(worker, "c", Lane.FRONT)
    assert worker.numbers == {"front": 2}, "launched at once, as the lane is connected"
    block_on(worker.lanes.commit(Lane.BACK))
    assert worker.opened == {Lane.FRONT, Lane.BACK}


def test_commit_of_nothing_connects_nothing() -> None:
    worker = alone()
    block_on(worker.lanes.commit(Lane.BACK))
    assert not worker.opened


class NeverEnds(SimulatedExchange):
    """An exchange of workers that reach the store, but not each other."""

    async def ended(self) -> bool:
        return False


def test_exchange_that_always_fails_ends_with_an_error() -> None:
    worker = alone()
    worker.lanes.start(NeverEnds("a", Lane.FRONT, worker), Lane.FRONT)
    with pytest.raises(RankLost, match="lost each other 9 times in a row without finishing an exchange"):
        block_on(worker.lanes.commit(Lane.FRONT))


def test_nobody_is_admitted_while_an_operation_is_in_flight() -> None:
    worker = alone()
    exchange(worker, "a", Lane.BACK)
    with pytest.raises(OffbeatError, match="only while no operation is in flight"):
        block_on(worker.lanes.admit(worker._hand_over))


def test_decisions_do_not_pile_up_in_the_registry() -> None:
    worker = alone()
    for number in range(20):
        exchange(worker, str(number), Lane.FRONT)
        block_on(worker.lanes.commit(Lane.FRONT))
    decisions = [key for key in worker.stage.registry.texts if key.startswith("decision/1/front")]
    assert decisions == ["decision/1/front/20"]
