"""Stretches and parts: what pulls bring, taken together, is every weight once, each under its own group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from offbeat.core.blocks import Layout
from offbeat.core.partition import ALIGNMENT_BYTES, EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.group_slices import GroupSlices, group_runs
from offbeat.strategies.ssd_sgd.sharded_optimizer import Partition


def _replica(numels: list[int], groups: list[int]) -> Replica:
    """One parameter a number; `groups` says into which group each goes, -1: into none."""
    params = [nn.Parameter(torch.zeros(n)) for n in numels]
    members = [[p for p, g in zip(params, groups, strict=True) if g == i] for i in range(max(groups) + 1)]
    optimizer = SGD([{"params": some} for some in members], lr=0.1)
    return Replica(nn.ParameterList(params), optimizer=optimizer, layout=Layout(256, 256))


@given(
    made=st.lists(st.tuples(st.integers(0, 100), st.integers(-1, 2)), min_size=1, max_size=8).filter(
        lambda made: any(numel for numel, _ in made) and max(group for _, group in made) >= 0
    ),
    world=st.integers(1, 5),
    among=st.integers(1, 6),
    evenly=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_parts_bring_every_weight_once_under_its_group(
    made: list[tuple[int, int]], world: int, among: int, evenly: bool
) -> None:
    replica = _replica([numel for numel, _ in made], [group for _, group in made])
    shares = Partition(replica.weights[0], replica.blocks, world, evenly)
    counts = [[torch.zeros_like(weight) for weight in replica.weights] for _ in replica.optimizer.groups]
    for number in range(among):
        stretches = GroupSlices(replica, [shares.spans(EvenSlice(number, among))])
        for group, flats in enumerate(counts):
            for view in stretches.of(flats)[group]:
                view.add_(1)
    for block in replica.blocks:
        for param, place in block.places():
            for group, flats in zip(replica.optimizer.groups, counts, strict=True):
                times = float(any(p is param for p in group["params"]))
                assert (flats[0][place : place + param.numel()] == times).all()


def test_a_group_is_one_stretch_however_many_parameters_it_has() -> None:
    replica = _replica([7] * 50, [0] * 50)
    assert [(run.start, run.stop) for _, run in group_runs(replica)] == [(0, 50 * 16)]
    whole = GroupSlices(replica, [[(3, 400), (500, 800)]])
    assert [view.numel() for view in whole.of(replica.weights)[0]] == [397, 300]


def test_groups_that_alternate_are_cut_where_they_change() -> None:
    replica = _replica([16, 16, 20, 16], [0, 1, 0, 0])  # in the flat weights they lie the other way round
    assert [(group, run.start, run.stop) for group, run in group_runs(replica)] == [
        (0, 0, 48),
        (1, 48, 64),
        (0, 64, 80),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("lines", "among"), [(12, 4), (13, 5), (3, 5), (0, 2), (7, 1)])
def test_parts_are_whole_lines_even_to_one(dtype: torch.dtype, lines: int, among: int) -> None:
    grain = ALIGNMENT_BYTES // dtype.itemsize
    flat = torch.arange(lines * grain).to(dtype)
    parts = [EvenSlice(number, among).of(flat) for number in range(among)]
    assert torch.equal(torch.cat(parts), flat)
    assert {part.numel() % grain for part in parts} == {0}
    sizes = [part.numel() // grain for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == max(sizes)
