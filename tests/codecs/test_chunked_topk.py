"""Chunked top-k: the largest entries of each chunk travel, quantized or as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import OffbeatError, Quantize, SettingError, TopK
from tests.support.coding import draw, passed, square, tensors


@given(tensors, st.sampled_from([0.01, 0.3, 1.0]), st.sampled_from([1, 255, 256, 2000]))
@settings(max_examples=25)
def test_every_chunk_sends_its_largest(x: Tensor, ratio: float, chunk: int) -> None:
    """Where magnitudes are equal, any of them."""
    decoded = passed(TopK(ratio, chunk=chunk), x)
    kept = decoded != 0
    assert torch.equal(decoded[kept], x[kept])
    for before, after in zip(x.split(chunk), decoded.split(chunk), strict=True):
        count = max(1, round(ratio * before.numel()))
        largest = before.abs().sort(descending=True).values[:count]
        assert torch.equal(after.abs().sort(descending=True).values[:count], largest)
        assert square(before - after) <= (1 - count / before.numel()) * square(before) * (1 + 1e-9)


@given(st.integers(0, 99), st.integers(1, 3000), st.sampled_from([8, 4, 2, 1]))
@settings(max_examples=25)
def test_what_is_sent_is_quantized_as_quantize_does(seed: int, numel: int, bits: int) -> None:
    x = draw(seed, numel, "normal")
    plain, coded = passed(TopK(0.2, chunk=100), x), passed(TopK(0.2, chunk=100, bits=bits), x)
    sent = plain != 0
    assert torch.equal(coded[sent], passed(Quantize(bits), plain[sent]))
    assert not coded[~sent].any()


@pytest.mark.parametrize("bits", [None, 8, 4, 2, 1])
@pytest.mark.parametrize("chunk", [10, 300])
def test_what_is_zero_stays_so(bits: int | None, chunk: int) -> None:
    """Also where a chunk has fewer other entries than it sends: gaps and unused parameters must not move."""
    x = torch.zeros(700)
    x[::35] = draw(1, 20, "normal")
    decoded = passed(TopK(0.5, chunk=chunk, bits=bits), x)
    assert decoded.any() and not decoded[x == 0].any()


def test_one_chunk_is_the_whole_tensor() -> None:
    x = draw(3, 5000, "normal")
    assert torch.equal(passed(TopK(0.07, chunk=5000), x), passed(TopK(0.07), x))


def test_a_packet_that_no_worker_made_is_refused() -> None:
    made = TopK(0.5, chunk=8)
    packet = torch.full((made.nbytes(12, torch.float32),), 9, dtype=torch.uint8)
    with pytest.raises(OffbeatError, match="packet"):
        made.accumulate(packet, torch.zeros(12))


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"bits": 2}, "without a chunk"),
        ({"chunk": 0}, "chunk=0"),
        ({"chunk": 70_000}, "chunk=70000"),
        ({"chunk": 64, "bits": 3}, "bits=3"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings_: dict[str, int], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        TopK(0.1, **settings_)  # type: ignore[arg-type]
