"""Slices of flat memory are what a list of views would be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.slices import Slices


@given(groups=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_slices_are_the_views_of_their_memory(groups: list[list[int]]) -> None:
    """In any number of tensors, some of them empty, with slices of any size at their ends."""
    sizes = [size for group in groups for size in group]
    numbers = torch.arange(float(sum(sizes)))
    memory = [part.clone() for part in numbers.split([sum(group) for group in groups])]
    slices, views = Slices(tuple(sizes), *memory), list(numbers.split(sizes)) if sizes else []
    assert len(slices) == len(sizes)
    assert slices.nbytes == tuple(4 * size for size in sizes)
    for each in (list(slices), slices[:], [slices[number - len(sizes)] for number in range(len(sizes))]):
        assert len(each) == len(views)
        assert all(map(torch.equal, each, views))
    assert list(map(len, slices[1::2])) == sizes[1::2]
    assert torch.equal(slices.joined(), numbers)
    slices.fill(-numbers)
    assert all(torch.equal(part, -view) for part, view in zip(slices, views, strict=True))
    for part in slices:
        part.zero_()
    assert not any(part.any() for part in memory), "slices are views"
    with pytest.raises(IndexError):
        slices[len(sizes)]


def test_memory_has_room_for_the_slices_and_nothing_else() -> None:
    for sizes in ((2, 2), (2, 4)):
        with pytest.raises(ValueError, match=f"slices of {sum(sizes)} entries in memory of 5"):
            Slices(sizes, torch.zeros(2), torch.zeros(3))


def test_one_tensor_is_joined_as_it_is() -> None:
    flat = torch.zeros(5)
    assert Slices((2, 3), flat).joined() is flat
