"""Who leaves when: the rank that may hold the store is the last to go."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from offbeat.worlds.processes import failure
from offbeat.worlds.processes.failure import FailureDetector


class Interleaved(HashStore):
    """Rank 1 looks for goodbyes only when rank 0 asks whether it has seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.other: FailureDetector | None = None

    def check(self, keys: list[str]) -> bool:
        if keys == ["seen/1"] and self.other is not None:
            other, self.other = self.other, None
            other.wait_for_exit(1.0)
        return super().check(keys)


def test_rank_0_stays_until_all_have_seen_the_goodbyes() -> None:
    store = Interleaved()
    first, second = (FailureDetector(store, rank, 2) for rank in range(2))
    store.other = second
    for failures in (first, second):
        failures.leave(3, "")
    first.wait_for_exit(1.0)
    assert store.other is None, "rank 0 has gone, and its store with it, while rank 1 was still looking"


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
