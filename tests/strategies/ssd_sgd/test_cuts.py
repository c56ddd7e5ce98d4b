"""Cuts: every element of every parameter is in one slice, and workers that are laid out alike share them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offbeat.core.blocks import Layout
from offbeat.core.partition import EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.cuts import Cuts
from offbeat.strategies.ssd_sgd.sharded_optimizer import Partition


@given(
    numels=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    world=st.integers(1, 40),
    parts=st.integers(1, 5),
    evenly=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_parts_have_every_element_once(numels: list[int], world: int, parts: int, evenly: bool) -> None:
    begins = [0]
    for numel in numels:
        begins.append(begins[-1] + -(-numel // 16) * 16)
    places = tuple(zip(begins, numels, strict=False))
    cuts = Cuts(places, begins[-1], 4, world, evenly)
    assert cuts.sizes == cuts.sizes_of(EvenSlice())
    counts = torch.zeros(sum(cuts.sizes))
    for part in [EvenSlice(number, parts) for number in range(parts)]:
        for worker, runs in cuts.runs_of(part).items():
            start, stop = cuts.spans(part)[worker]
            assert runs, "who has none is left out"
            assert cuts.sizes_of(part)[worker] == stop - start
            for number, first, last, offset in runs:
                assert start + offset == begins[number] + first
                assert start <= begins[number] + first < begins[number] + last <= stop
                counts[begins[number] + first : begins[number] + last] += 1
    expected = torch.zeros_like(counts)
    for begin, numel in places:
        expected[begin : begin + numel] = 1
    assert torch.equal(counts, expected)
    together = {
        worker: sum(run.stop - run.start for run in runs) for worker, runs in cuts.runs(parts).items()
    }
    assert list(together) == sorted(together)
    for worker, entries in together.items():
        start, stop = cuts.spans(EvenSlice())[worker]
        assert entries == expected[start:stop].sum()


def _partition(numel: int, world: int) -> Partition:
    replica = Replica(nn.ParameterList([nn.Parameter(torch.zeros(numel))]), layout=Layout(256, 256))
    return Partition(replica.weights[0], replica.blocks, world, evenly=True, parts=2)


def test_workers_that_are_laid_out_alike_share_the_cuts_but_not_the_parameters() -> None:
    one, alike, other, more = (_partition(*each) for each in ((40, 3), (40, 3), (41, 3), (40, 4)))
    part = EvenSlice(1, 2)
    assert one.spans(part) is alike.spans(part)
    assert one.sizes_of(part) is alike.sizes_of(part)
    assert one.spans(part) is not other.spans(part)
    assert one.spans(part) is not more.spans(part)
    (own,), (theirs,) = one.shards[0], alike.shards[0]
    assert own[1:] == theirs[1:]
    assert own.param is not theirs.param
