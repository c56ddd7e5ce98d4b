"""TopK: the largest entries travel, no others; by a sample as by a full search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import OffbeatError, TopK
from offbeat.codecs.topk import sampled_topk
from tests.support.coding import draw, large_tensors, passed, square, tensors


@given(st.one_of(tensors, large_tensors), st.sampled_from([0.003, 0.1, 0.5, 0.9, 1.0]))
@settings(max_examples=25)
def test_topk_sends_the_largest(x: Tensor, ratio: float) -> None:
    count = max(1, round(ratio * x.numel()))
    ordered = x.double().square().sort().values
    lost = ordered[: x.numel() - count].sum().item()
    for made in (TopK(ratio), TopK(ratio, sampled=False)):
        decoded = passed(made, x)
        kept = decoded != 0
        assert torch.equal(decoded[kept], x[kept])
        assert kept.sum() <= count
        assert square(x - decoded) == pytest.approx(lost, rel=1e-9)
        assert square(x - decoded) <= (1 - count / x.numel()) * square(x) * (1 + 1e-9)


@given(large_tensors, st.integers(1, 500))
@settings(max_examples=6)
def test_a_sampled_threshold_finds_no_other_entries(x: Tensor, count: int) -> None:
    found = sampled_topk(x, count)
    assert torch.equal(found, found.unique())
    assert found.numel() == min(count, int((x != 0).sum()))
    assert torch.equal(x[found].abs().sort(descending=True).values, x.abs().topk(found.numel()).values)


@pytest.mark.parametrize("numel", [10, 70_000])
def test_a_packet_that_no_worker_made_is_refused(numel: int) -> None:
    made = TopK(0.5)
    packet = torch.zeros(made.nbytes(numel, torch.float32), dtype=torch.uint8)
    packet[-2:] = 255  # the last index
    with pytest.raises(OffbeatError, match="packet"):
        made.accumulate(packet, torch.zeros(numel))


def test_a_packet_may_hold_another_number_of_entries() -> None:
    """A ratio that changes from push to push: whoever decodes learns the number from the packet's size."""
    x = draw(0, 1000, "normal")
    packet = torch.empty(TopK(0.2).nbytes(1000, torch.float32), dtype=torch.uint8)
    TopK(0.2).encode(None, x, packet)
    decoded = torch.empty_like(x)
    TopK(0.5).decode(packet, decoded)
    assert torch.equal(decoded, passed(TopK(0.2), x))
