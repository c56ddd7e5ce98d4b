"""Who leaves when: the rank that may hold the store is the last to go."""

from __future__ import annotations

from torch.distributed import HashStore

from offbeat.worlds.processes.failure import FailureDetector


class Interleaved(HashStore):
    """Rank 1 looks for goodbyes only when rank 0 asks whether it has seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.other: FailureDetector | None = None

    def check(self, keys: list[str]) -> bool:
        if keys == ["seen/1"] and self.other is not None:
            other, self.other = self.other, None
            other.await_goodbyes(1.0)
        return super().check(keys)


def test_rank_0_stays_until_all_have_seen_the_goodbyes() -> None:
    store = Interleaved()
    first, second = (FailureDetector(store, rank, 2) for rank in range(2))
    store.other = second
    for rollcall in (first, second):
        rollcall.leave(3, "")
    first.await_goodbyes(1.0)
    assert store.other is None, "rank 0 has gone, and its store with it, while rank 1 was still looking"
