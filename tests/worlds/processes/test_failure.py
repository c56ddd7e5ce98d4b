"""Who leaves when: the rank that may hold the store is the last to go."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from torch.distributed import HashStore

from offbeat.errors import RankLost
from offbeat.worlds.processes import failure
from offbeat.worlds.processes.failure import FailureDetector
from tests.support.beside import beside
from tests.support.limits import HANG_S


class Interleaved(HashStore):
    """Rank 1 looks for goodbyes only when rank 0 asks for the third time whether it has seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.other: FailureDetector | None = None
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += keys == ["seen/1"]
        if self.asked == 3 and self.other is not None:
            other, self.other = self.other, None
            other.wait_for_exit(HANG_S)
        return super().check(keys)


def test_rank_0_stays_until_all_have_seen_the_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow they are: its patience is the one that it was given."""
    monkeypatch.setattr(failure, "GRACE_S", 0.0)
    store = Interleaved()
    first, second = (FailureDetector(store, rank, 2) for rank in range(2))
    store.other = second
    for each in (first, second):
        each.leave(3, "")
    first.wait_for_exit(HANG_S)
    assert store.other is None, "rank 0 has gone, and its store with it, while rank 1 was still looking"


def test_one_who_never_answers_is_named_when_the_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no rank 2; rank 1 has answered."""
    monkeypatch.setattr(failure, "GRACE_S", 0.0)
    store = HashStore()
    store.set("failed/1", "nothing came")
    told = str(FailureDetector(store, 0, 3).diagnose("nothing came"))
    assert "rank 2 is gone or stuck" in told
    assert "rank 1" not in told


def test_one_who_never_leaves_is_named_when_the_patience_is_over() -> None:
    store = HashStore()
    rolls = [FailureDetector(store, rank, 3) for rank in range(3)]
    for roll in rolls[:2]:
        roll.leave(3, "")
    with pytest.raises(RankLost, match="rank 0 has ended its loop, but rank 2 has not"):
        rolls[0].wait_for_exit(0.0)


def test_rank_0_waits_for_nobody_who_left_because_it_failed() -> None:
    """That one does not look for goodbyes."""
    store = HashStore()
    first, second = (FailureDetector(store, rank, 2) for rank in range(2))
    first.leave(3, "")
    second.leave(3, "ValueError: out of coffee")
    first.wait_for_exit(HANG_S)


def test_a_lost_rank_is_named_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is silent, rank 0 saw the failure itself, and rank 1 only what rank 0 reported."""
    monkeypatch.setattr(failure, "GRACE_S", 0.0)
    store = HashStore()
    first, second = (FailureDetector(store, rank, 3) for rank in range(2))
    errors = [first.diagnose("connection closed by peer"), second.check(operation=7)]
    for rank, error in enumerate(errors):
        text = str(error)
        assert "rank 2 is gone or stuck: it does not answer" in text
        assert "the first failure was on rank 0: connection closed by peer" in text
        assert f"(seen by rank {rank})" in text


def test_no_first_failure_is_told_where_a_rank_left_with_its_reason() -> None:
    store = HashStore()
    FailureDetector(store, 1, 2).leave(3, "ValueError: no more data")
    text = str(FailureDetector(store, 0, 2).diagnose("connection closed by peer"))
    assert text == "rank 1 failed: ValueError: no more data (seen by rank 0)"


# --- meetings


def _detectors(store: HashStore, world: int = 2) -> list[FailureDetector]:
    return [FailureDetector(store, rank, world) for rank in range(world)]


def _meet(detector: FailureDetector, call: str = "consensus()", operations: int = 3) -> Future[None]:
    future: Future[None] = beside(detector.meet, call, operations, HANG_S)
    return future


def test_all_ranks_meet_again_and_again() -> None:
    ranks = _detectors(HashStore(), 3)
    for call in ("consensus()", "consensus()", failure.CLOSE):
        for each in [_meet(rank, call) for rank in ranks]:
            each.result(HANG_S)


def test_a_world_of_one_meets_nobody() -> None:
    FailureDetector(HashStore(), 0, 1).meet("consensus()", 0, 0.0)


def test_a_rank_that_is_elsewhere_is_named_on_both_sides() -> None:
    ranks = _detectors(HashStore())
    alone, ended = _meet(ranks[0]), _meet(ranks[1], failure.CLOSE)
    with pytest.raises(
        RankLost, match=r"rank 0 is in consensus\(\), but rank 1 is in close\(\): all ranks must"
    ):
        alone.result(HANG_S)
    with pytest.raises(
        RankLost, match=r"rank 1 is in close\(\), but rank 0 is in consensus\(\): all ranks must"
    ):
        ended.result(HANG_S)


def test_a_rank_alone_in_consensus_and_one_that_trains_on() -> None:
    """The latter waits for an operation that the former has not started; both are told, at once."""
    first, second = _detectors(HashStore())
    alone = _meet(first, operations=3)
    error = None
    while error is None:
        assert second.check(operation=3) is None  # this one both have started
        error = second.check(operation=4)
    assert "rank 0 is in consensus() while rank 1 trains on: all ranks must call it together" in str(error)
    with pytest.raises(RankLost, match=r"rank 0 is in consensus\(\), but rank 1 is not.*rank 1 trains on"):
        alone.result(HANG_S)


def test_a_rank_that_ends_early_and_one_that_trains_on() -> None:
    first, second = _detectors(HashStore())
    ended = _meet(first, failure.CLOSE, operations=3)
    error = None
    while error is None:
        error = second.check(operation=4)
    assert "rank 0 ended its loop early, and rank 1 trains on" in str(error)
    assert "same number of batches" in str(error)
    with pytest.raises(
        RankLost, match=r"rank 0 has ended its loop, but rank 1 has not.*same number of batches"
    ):
        ended.result(HANG_S)


def test_a_rank_that_has_failed_is_not_waited_for() -> None:
    first, second = _detectors(HashStore())
    second.leave(3, "ValueError: out of coffee")
    with pytest.raises(RankLost, match=r"rank 1 is not.*\(rank 1 left: ValueError: out of coffee\)"):
        first.meet("consensus()", 3, HANG_S)


def test_a_rank_that_died_is_waited_for_as_long_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "CHECK_S", 0.0)
    with pytest.raises(RankLost, match=r"rank 0 is in consensus\(\), but rank 1, 2 is not"):
        FailureDetector(HashStore(), 0, 3).meet("consensus()", 3, 0.0)


def test_a_store_that_is_gone_ends_a_meeting() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

    with pytest.raises(RankLost, match=r"rendezvous store is gone.*connection reset"):
        FailureDetector(Gone(), 0, 2, timeout_s=0.1).meet("consensus()", 3, HANG_S)


def test_the_last_to_arrive_is_known_to_all() -> None:
    first, second = _detectors(HashStore())
    assert not second.arrive("reader")
    assert first.arrive("reader")
    assert [each.arrived_last("reader") for each in (first, second)] == [0, 0]


def test_in_a_group_a_meeting_names_global_ranks() -> None:
    store = HashStore()
    calls = enumerate(("consensus()", "x"))
    alone, ended = (_meet(FailureDetector(store, rank, 2, (4, 7)), call) for rank, call in calls)
    with pytest.raises(RankLost, match=r"rank 4 is in consensus\(\), but rank 7 is in x: all ranks must"):
        alone.result(HANG_S)
    with pytest.raises(RankLost, match=r"rank 7 is in x, but rank 4 is in consensus\(\)"):
        ended.result(HANG_S)
