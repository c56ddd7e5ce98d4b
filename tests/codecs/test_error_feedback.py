"""Error feedback: nothing is lost, only late."""

from __future__ import annotations

import pytest
import torch

from offbeat import Codec, ErrorFeedback, PowerSGD, SettingError, TopK
from offbeat.core.blocks import Matrix
from tests.support.coding import PACKETS, averaged, draw, every_codec, passed, square

KEEPING = [made for made in PACKETS if made.contractive]


@pytest.mark.parametrize("inside", [*KEEPING, PowerSGD(2)], ids=str)
def test_nothing_is_lost_only_late(inside: Codec) -> None:
    """All that came and what is kept are all that there was."""
    made = ErrorFeedback(inside)
    size = 1200
    wire = made.stream(torch.empty(size), [Matrix(0, 30, 40)])
    total, came, most = torch.zeros(size).double(), torch.zeros(size).double(), 0.0
    for step in range(50):
        x = draw(step, size, "normal")
        total += x
        most = max(most, square(x) ** 0.5)
        came += averaged(made, wire, x)
        off = (total - came - wire.memory.error).abs().max().item()
        assert off <= 1e-5 * most
    assert square(wire.memory.error) ** 0.5 <= 2 * (1 - 0.1) ** 0.5 / 0.1 * most


@every_codec
def test_feeding_back_into_packets_is_feeding_back_into_means(made: Codec) -> None:
    if not made.contractive:
        with pytest.raises(SettingError, match="larger than the tensor"):
            ErrorFeedback(made)
        return
    kept = ErrorFeedback(made)
    memory, wire = kept.init(torch.empty(500)), kept.stream(torch.empty(500))
    for step in range(5):
        x = draw(step, 500, "normal")
        assert torch.equal(passed(kept, x, memory), averaged(kept, wire, x.clone()))
        assert torch.equal(memory.error, wire.memory.error)
        assert memory.error.any()


@pytest.mark.parametrize("inside", [*KEEPING, PowerSGD(2)], ids=str)
def test_what_is_kept_survives_what_is_not_finite(inside: Codec) -> None:
    made = ErrorFeedback(inside)
    wire = made.stream(torch.empty(1200), [Matrix(0, 30, 40)])
    averaged(made, wire, draw(0, 1200, "normal"))
    before = wire.memory.error.clone()
    spoilt = draw(1, 1200, "normal")
    spoilt[777] = torch.nan
    assert not averaged(made, wire, spoilt).isfinite().all()
    assert torch.equal(wire.memory.error, before)
    assert averaged(made, wire, draw(2, 1200, "normal")).isfinite().all()


def test_what_waits_counts_less_with_a_decay() -> None:
    """Entries 4, 2, 1 and one sent at a time, then nothing new: 4; 2 · ½; 1 · ¼."""
    made = ErrorFeedback(TopK(0.3), decay=0.5)
    memory, x = made.init(torch.zeros(3)), torch.tensor([4.0, 2.0, 1.0])
    assert passed(made, x, memory).tolist() == [4.0, 0.0, 0.0]
    assert memory.error.tolist() == [0.0, 2.0, 1.0]
    assert passed(made, torch.zeros(3), memory).tolist() == [0.0, 1.0, 0.0]
    assert passed(made, torch.zeros(3), memory).tolist() == [0.0, 0.0, 0.25]
    assert not memory.error.any()


@pytest.mark.parametrize("inside", KEEPING, ids=str)
def test_what_is_kept_is_bounded_by_its_decay(inside: Codec) -> None:
    """r ← ½ r + x − sent, which is never more than ½ r + x: ‖r‖ ≤ 2 max ‖x‖ under any such codec."""
    made = ErrorFeedback(inside, decay=0.5)
    memory, most = made.init(torch.empty(900)), 0.0
    for step in range(20):
        x = draw(step, 900, "heavy")
        most = max(most, square(x) ** 0.5)
        wanted = x + 0.5 * memory.error
        left = wanted - passed(made, x, memory)
        torch.testing.assert_close(memory.error, left, rtol=1e-4, atol=1e-5 * most)
        assert square(left) ** 0.5 <= 2 * most


def test_a_decay_is_a_fraction() -> None:
    for decay in (0.0, 1.5):
        with pytest.raises(SettingError, match="decay"):
            ErrorFeedback(TopK(0.1), decay=decay)
