"""Blocks: whole parameters in backward order, of good sizes, with marks for gradients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.core.blocks import (
    FIRST_BLOCK_BYTES,
    LARGEST_BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    Block,
    block_sizes,
    make_blocks,
    trainable_bytes,
)
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.replica import Replica
from tests.support.parameters import by_dtype, named_parameters, parameters


def _nbytes(block: Block) -> int:
    return sum(p.numel() * p.element_size() for p in block.params)


@given(parameters, st.integers(1, 2000), st.integers(1, 2000))
def test_blocks_are_whole_parameters_in_backward_order(kinds, first_bytes: int, block_bytes: int) -> None:
    named = named_parameters(kinds)
    blocks = make_blocks(named, first_bytes, block_bytes)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for dtype, alike in by_dtype(blocks).items():
        expected = [(n, p) for n, p in reversed(named) if p.dtype == dtype]
        found = [(n, p) for b in alike for n, p in zip(b.names, b.params, strict=True)]
        assert [n for n, _ in found] == [n for n, _ in expected]
        assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))
        for block in alike[:-1]:
            assert _nbytes(block) >= (block_bytes if block.index else first_bytes)
        for block in alike:  # no longer than it must be: without its last parameter it would be too small
            limit = max(block_bytes, first_bytes)
            assert _nbytes(block) - block.params[-1].numel() * block.params[-1].element_size() < limit


@pytest.mark.parametrize(
    ("layers", "width", "blocks"),
    [(4, 64, 1), (16, 64, 1), (32, 128, 8), (32, 280, 11), (12, 512, 12), (64, 1024, 33)],
    ids=["66 kB", "266 kB", "2 MB", "10 MB", "13 MB", "269 MB"],
)
def test_models_are_cut_into_a_dozen_blocks_neither_tiny_nor_huge(
    layers: int, width: int, blocks: int
) -> None:
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(layers)))
    sizes = [
        _nbytes(block)
        for block in make_blocks(model.named_parameters(), *block_sizes(trainable_bytes(model)))
    ]
    assert len(sizes) == blocks
    assert sum(sizes) == trainable_bytes(model)
    layer = sum(p.nbytes for p in model[0].parameters())
    assert sizes[0] <= FIRST_BLOCK_BYTES + layer, "sending starts early"
    assert max(sizes) <= LARGEST_BLOCK_BYTES + layer
    assert all(size >= SMALLEST_BLOCK_BYTES for size in sizes[:-1])


def test_marks_tell_who_has_a_gradient() -> None:
    model = nn.Linear(4, 3)
    replica = Replica(model)
    lay_out_gradients(replica)
    (block,) = replica.blocks
    assert block.names == ["bias", "weight"]
    block.absent.append(model.weight)
    block.mark()
    assert block.marked[block.numel :].tolist() == [1, 0]
    assert block.name_of(model.weight) == "weight"
    block.marked[-1] = 0.5  # the mean over two workers: the other one has one
    block.hand_out()
    assert model.weight.grad is block.grad_views[1]
    block.absent.append(model.weight)
    block.mark()
    block.hand_out()
    assert model.weight.grad is None
    assert not block.absent
