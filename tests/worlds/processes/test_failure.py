"""Who leaves when: the rank that may hold the store is the last to go."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from offbeat.errors import RankLost
from offbeat.worlds.processes import failure
from offbeat.worlds.processes.failure import FailureDetector
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
