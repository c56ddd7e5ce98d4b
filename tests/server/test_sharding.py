"""Sharding: slices of the flat weights cover every element once, evenly and in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.server.sharding import split_shards


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 9))
def test_shares_cover_every_element_once_and_evenly(sizes: list[int], shards: int) -> None:
    flats = [torch.zeros(size) for size in sizes]
    parts = split_shards(flats, shards)
    assert len(parts) == shards
    for part in parts:
        for piece in part:
            piece.add_(1)
    assert all((flat == 1).all() for flat in flats), "the pieces are views"
    for each in zip(*parts, strict=True):
        lengths = [piece.numel() for piece in each]
        assert max(lengths) - min(lengths) <= 1
    for flat in flats:
        flat.copy_(torch.arange(flat.numel()))
    for flat, *pieces in zip(flats, *parts, strict=True):
        assert torch.equal(torch.cat(pieces), flat), "in order"
