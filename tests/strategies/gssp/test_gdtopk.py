"""GDTopK: the table of ratios, as text and back, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offbeat import GSSP, GDTopK, Half, Replica, SettingError, TopK
from offbeat.core.settings import build
from offbeat.server.packets import allocate, decode, encode


def sent(sparse: GDTopK, speed: int, epoch: int) -> float:
    """The part of a push in the first step of an epoch, counted from 1."""
    assert sparse.epoch_steps is not None
    form = sparse.codec_index(speed, (epoch - 1) * sparse.epoch_steps + 1)
    codec = sparse.push_codecs[form - 1]
    assert isinstance(codec, TopK)
    return codec.ratio


@pytest.mark.parametrize("more", ["slow", "fast"])
def test_the_ratio_goes_by_group_and_epoch(more: str) -> None:
    sparse = GDTopK(more=more, epoch_steps=10, floor=0)
    rows = [[sent(sparse, speed, epoch) for epoch in range(1, 8)] for speed in range(3)]
    fastest, middle, slowest = rows if more == "slow" else reversed(rows)
    assert fastest == [0.35, 0.25, 0.0625, 0.0156, 0.004, 0.004, 0.004]
    assert middle == [0.35, 0.3, 0.09, 0.027, 0.0081, 0.0081, 0.0081]
    assert slowest == [0.35, 0.35, 0.1225, 0.0429, 0.015, 0.015, 0.015]


def test_no_ratio_is_below_the_floor() -> None:
    sparse = GDTopK(epoch_steps=10)
    rows = [[sent(sparse, speed, epoch) for epoch in range(1, 6)] for speed in range(3)]
    assert rows == [
        [0.35, 0.25, 0.0625, 0.05, 0.05],
        [0.35, 0.3, 0.09, 0.05, 0.05],
        [0.35, 0.35, 0.1225, 0.05, 0.05],
    ]
    assert sent(GDTopK(epoch_steps=10, ratio=0.01), 1, 5) == 0.01, "what was asked for stays"
    assert not GDTopK(epoch_steps=10, floor=1).push_codecs
    assert GDTopK(epoch_steps=10, floor=1).codec_index(0, 41) == 0


def test_without_dense_pushes_an_epoch_ends_like_any_step() -> None:
    sparse = GDTopK(epoch_steps=4, dense=False)
    assert 0 not in [sparse.codec_index(1, step) for step in range(1, 13)]


def test_the_last_push_of_an_epoch_is_whole() -> None:
    sparse = GDTopK(epoch_steps=4)
    assert [sparse.codec_index(1, step) == 0 for step in range(1, 13)] == [False, False, False, True] * 3
    one = GDTopK(epoch_steps=4, ratio=0.1)
    assert (
        one.push_codecs == (TopK(0.1),)
        and [one.codec_index(2, step) for step in range(1, 9)] == [1, 1, 1, 0] * 2
    )
    assert not GDTopK(ratio=1).push_codecs


@pytest.mark.parametrize(
    "sparse",
    [
        GDTopK(),
        GDTopK(more="fast", epoch_steps=7),
        GDTopK(ratio=0.5, answers="full"),
        GDTopK(floor=0, dense=False),
    ],
    ids=str,
)
def test_it_is_a_setting_like_others(sparse: GDTopK) -> None:
    strategy = GSSP(groups="0/1", sparse=sparse)
    assert build(GSSP, strategy.settings()) == strategy
    assert build(GSSP, {"sparse": str(sparse)}).sparse == sparse
    assert build(GSSP, {"sparse": "none"}).sparse is None
    assert strategy.server_half().pull_codec == (Half() if sparse.answers == "half" else None)


def test_epochs_are_filled_in_where_the_data_is_known() -> None:
    model = nn.Linear(2, 2)
    known = Replica(model, steps_per_epoch=12)
    assert GSSP(sparse=GDTopK()).init(known).sparse == GDTopK(epoch_steps=12)
    said = GDTopK(epoch_steps=99)
    assert GSSP(sparse=said).init(known).sparse == said, "what was said stays"
    assert GSSP().init(known).sparse is None
    with pytest.raises(SettingError, match="epoch_steps"):
        GSSP(sparse=GDTopK()).init(Replica(model))
    GSSP(sparse=GDTopK(ratio=1)).init(Replica(model))


@pytest.mark.parametrize(
    "bad",
    [
        {"more": "both"},
        {"answers": "quarter"},
        {"ratio": 0},
        {"ratio": 1.1},
        {"floor": -0.1},
        {"floor": 2},
        {"epoch_steps": 0},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        GDTopK(**bad)


@pytest.mark.parametrize("text", ["topk(0.1)", "gdtopk(more=slow", "gdtopk(depth=3)", "gdtopk(more)"])
def test_texts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingError):
        build(GSSP, {"sparse": text})


def test_anything_else_is_refused() -> None:
    with pytest.raises(SettingError, match="GDTopK"):
        GSSP(sparse=TopK(0.1))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=3), st.floats(0.01, 1.0), st.integers(0, 9))
def test_what_travels_and_what_is_left_add_up(sizes: list[int], ratio: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codec = TopK(ratio)
    parts = [torch.randn(size, generator=generator) for size in sizes]
    before = [part.clone() for part in parts]
    packets, arrived = allocate(codec, parts), [torch.full_like(part, 7.0) for part in parts]
    encode(codec, parts, packets, 1)
    decode(codec, packets, arrived)
    for part, came, all_of_it in zip(parts, arrived, before, strict=True):
        assert torch.equal(part + came, all_of_it), "exactly: an entry travels as it is, or stays"
        assert not (part * came).any()
        assert came.count_nonzero() <= max(1, round(ratio * len(part)))
