"""Index coding: indices come back from 16 bits each, and what no encoder writes is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.codecs.index_coding import (
    COUNT_DTYPE,
    INDEX_DTYPE,
    PAGE,
    count_pages,
    decode_indices,
    encode_indices,
)
from offbeat.errors import OffbeatError


def encoded(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    counts = torch.empty(count_pages(numel), dtype=COUNT_DTYPE)
    entries = torch.empty(indices.numel(), dtype=INDEX_DTYPE)
    encode_indices(indices, numel, counts, entries)
    return counts, entries


@pytest.mark.parametrize(
    ("numel", "pages"), [(1, 0), (PAGE, 0), (PAGE + 1, 2), (3 * PAGE, 3), (3 * PAGE + 1, 4)]
)
def test_one_page_needs_no_counts(numel: int, pages: int) -> None:
    assert count_pages(numel) == pages


@given(st.data(), st.sampled_from([1, 100, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 7]))
def test_indices_come_back(data: st.DataObject, numel: int) -> None:
    chosen = data.draw(st.sets(st.integers(0, numel - 1), min_size=1, max_size=50))
    indices = torch.tensor(sorted(chosen))
    counts, entries = encoded(indices, numel)
    assert torch.equal(decode_indices(counts, entries, numel), indices)
    assert counts.sum() == (len(chosen) if numel > PAGE else 0)


def test_counts_and_places_by_hand() -> None:
    counts, entries = encoded(torch.tensor([3, PAGE - 1, 2 * PAGE, 2 * PAGE + 5]), 2 * PAGE + 6)
    assert counts.tolist() == [2, 0, 2]
    assert entries.tolist() == [3, PAGE - 1, 0, 5]


def test_what_no_encoder_writes_is_refused() -> None:
    counts, entries = encoded(torch.tensor([3, PAGE + 5]), PAGE + 6)
    with pytest.raises(OffbeatError, match="a packet's counts do not match its indices"):
        decode_indices(counts + 1, entries, PAGE + 6)
    with pytest.raises(OffbeatError, match="a packet's counts do not match its indices"):
        decode_indices(torch.tensor([3, -1], dtype=COUNT_DTYPE), entries, PAGE + 6)
    with pytest.raises(OffbeatError, match=f"an index beyond the {PAGE + 5} entries"):
        decode_indices(counts, entries, PAGE + 5)
