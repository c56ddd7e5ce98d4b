"""Partition of the data by label: chunks hold few classes each, and all classes together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import SettingError, label_skew

seeds = st.integers(0, 1 << 40)


@st.composite
def skews(draw: Any) -> tuple[list[int], int, int]:
    classes, workers = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    a_worker = draw(st.integers(-(-classes // workers), classes))
    sizes = draw(st.lists(st.integers(8, 30), min_size=classes, max_size=classes))
    labels = [3 * label for label, size in enumerate(sizes) for _ in range(size)]
    return draw(st.permutations(labels)), workers, a_worker


@settings(deadline=None)
@given(skews(), seeds)
def test_shards_hold_few_classes_and_together_all(skew: tuple[list[int], int, int], seed: int) -> None:
    labels, workers, a_worker = skew
    shards = label_skew(labels, workers, a_worker, seed)
    assert len(shards) == workers
    assert len({len(shard) for shard in shards}) == 1
    dealt = torch.cat(shards).tolist()
    assert len(set(dealt)) == len(dealt) > 0
    assert all(len({labels[i] for i in shard.tolist()}) <= a_worker for shard in shards)
    again = label_skew(list(labels), workers, a_worker, seed)
    assert all(map(torch.equal, shards, again))


def test_equal_classes_are_dealt_out_whole() -> None:
    """10 classes of 60 to 4 workers, 3 each: 8 in one piece, 2 in halves; nothing is cut."""
    labels = torch.arange(10).repeat(60)
    shards = label_skew(labels, 4, 3)
    assert [len(labels[shard].unique()) for shard in shards] == [3] * 4
    assert [len(shard) for shard in shards] == [150] * 4
    one_each = label_skew(labels, 10, 1)
    assert sorted(int(labels[shard].unique()) for shard in one_each) == list(range(10))


@pytest.mark.parametrize(("workers", "a_worker"), [(4, 2), (4, 11), (1, 9)])
def test_skews_that_leave_a_class_to_nobody(workers: int, a_worker: int) -> None:
    with pytest.raises(SettingError, match="every class goes to some worker"):
        label_skew(torch.arange(10).repeat(6), workers, a_worker)
