"""OSP's split, as numbers: what comes late, in which runs it travels, and which settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offbeat import OSP, SettingError
from offbeat.core.blocks import Block, Layout
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.members import Part
from offbeat.core.replica import Replica
from offbeat.strategies.osp.deferred import allocate_flats, split_by_block
from offbeat.strategies.osp.split import (
    UNKNOWN,
    contiguous_runs,
    importance_of,
    least_important,
    marked_bytes,
)

importances = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, UNKNOWN, float("nan")]), min_size=1, max_size=9)


@settings(deadline=None)
@given(importances, st.data())
def test_the_least_important_that_fit_come_late(importance: list[float], data: st.DataObject) -> None:
    count = len(importance)
    nbytes = data.draw(st.lists(st.integers(1, 100), min_size=count, max_size=count))
    budget = data.draw(st.floats(0, 120 * count))
    pinned = data.draw(st.sets(st.integers(0, count - 1)))
    late = least_important(importance, nbytes, budget, pinned)
    assert late == sorted(set(late))
    assert len(late) < count, "one at least stays"
    assert sum(nbytes[i] for i in late) <= budget
    assert not pinned & set(late)
    assert all(importance[i] < UNKNOWN for i in late)
    candidates = [i for i in range(count) if i not in pinned and importance[i] < UNKNOWN]
    for i in set(candidates) - set(late):  # it did not fit beside the less important ones, or all would go
        before = [j for j in late if (importance[j], j) < (importance[i], i)]
        assert sum(nbytes[j] for j in before) + nbytes[i] > budget or len(late) == count - 1


def test_ties_go_by_index_and_what_does_not_fit_is_passed_over() -> None:
    assert least_important([1.0, 1.0, 1.0, 9.0], [10, 10, 10, 10], 20) == [0, 1]
    assert least_important([0.1, 0.2, 0.3, 9.0], [10, 90, 10, 10], 20) == [0, 2]
    assert least_important([0.1, 0.2], [10, 10], 0) == []
    assert least_important([0.1, 0.2], [10, 10], 100) == [0]


def _blocks(sizes: list[int], double: set[int] = frozenset()) -> list[Block]:  # type: ignore[assignment]
    dtypes = [torch.float64 if i in double else torch.float32 for i in range(len(sizes))]
    params = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip(sizes, dtypes, strict=True)]
    model = nn.ParameterList(params)
    replica = Replica(model, layout=Layout(1, 1))
    lay_out_gradients(replica)
    return replica.blocks


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.data())
def test_what_stays_travels_in_runs_of_neighbours(sizes: list[int], data: st.DataObject) -> None:
    double = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    blocks = _blocks(sizes, double)
    late = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) - 1))
    first, others = data.draw(st.integers(1, 1000)), data.draw(st.integers(1, 3000))
    joined = contiguous_runs(blocks, late, first, others)
    assert [i for run in joined for i in run] == [i for i in range(len(sizes)) if i not in late]
    for number, run in enumerate(joined):
        flat = blocks[run[0]].marked.as_strided((sum(blocks[i].marked.numel() for i in run),), (1,))
        at = flat.data_ptr()
        for i in run:
            assert blocks[i].marked.data_ptr() == at
            assert blocks[i].marked.dtype == flat.dtype
            at += blocks[i].marked.nbytes
        enough = first if number == 0 else others
        assert sum(marked_bytes(blocks[i]) for i in run[:-1]) < enough, "it ends once there is enough"
    if len(sizes) - 1 in late:
        assert len(joined[-1]) == 1, "little waits for the end of backward"


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.data())
def test_there_is_room_for_whatever_comes_late(sizes: list[int], data: st.DataObject) -> None:
    blocks = _blocks(sizes, data.draw(st.sets(st.integers(0, len(sizes) - 1))))
    budget = data.draw(st.floats(0, 1)) * sum(map(marked_bytes, blocks))
    importance = data.draw(st.permutations([float(i) for i in range(len(sizes))]))
    flats = allocate_flats(blocks, budget)
    late = [blocks[i] for i in least_important(importance, list(map(marked_bytes, blocks)), budget)]
    parts = split_by_block(flats, late, marked=True)
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    for number, (block, part) in enumerate(zip(late, parts, strict=True)):
        assert part.numel() == block.numel + len(block.params)
        assert part.dtype == block.weight.dtype
        assert (part == number + 1).all(), "parts do not overlap"
    for block in blocks:
        assert split_by_block(flats, [block])[0].numel() == block.numel, "any single one fits, as scratch"


@pytest.mark.parametrize(
    "bad",
    [
        {"budget": -0.1},
        {"budget": 1.5},
        {"budget": "much"},
        {"budget": True},
        {"budget": float("nan")},
        {"growth": -1},
        {"growth": 2.5},
        {"importance": "size"},
        {"correction": "hope"},
        {"mix": 1.5},
        {"mix": "half"},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        OSP(**bad)


def test_batch_norm_has_blocks_of_its_own() -> None:
    strategy = OSP()
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) for _ in range(5)))
    layout = strategy.layout(model)
    apart = layout.isolate
    assert len(apart) == 10
    blocks = Replica(model, layout=layout).blocks
    assert len(blocks) > 3
    for block in blocks:
        assert len({param in apart for param in block.params}) == 1
    assert not OSP(budget=0).layout(model).isolate


def test_a_rank_with_a_part_of_a_block_has_its_summand_of_the_mean() -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    param.part = Part(4, 8, 1.0)  # type: ignore[attr-defined]  # of 8 elements in all
    replica = Replica(nn.ParameterList([param]))
    lay_out_gradients(replica)
    [block] = replica.blocks
    grad = torch.zeros_like(block.weight)
    grad[:3] = torch.tensor([2.0, 1.0, -1.0])
    scratch = torch.empty_like(grad)
    assert importance_of("weight-gradient", block, grad, scratch) == (2 + 2 + 3) / 8
    assert importance_of("gradient", block, grad, scratch) == (2 + 1 + 1) / 8
