"""Codecs: what a packet holds, how large it is, and how far off what it decodes to may be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import BFloat16, Codec, ErrorFeedback, Half, OffbeatError, PowerSGD, Quantize, RandomK, TopK
from offbeat.codecs import CODECS, Matrix, codec
from offbeat.codecs.topk import largest
from offbeat.errors import SettingError
from offbeat.port import Arrived, Lane, Op, block_on

PACKETS = [
    TopK(0.1),
    TopK(0.1, sampled=False),
    RandomK(0.1),
    RandomK(0.1, unbiased=True),
    Quantize(8),
    Quantize(4),
    Quantize(1),
    Quantize(8, stochastic=True),
    Quantize(4, stochastic=True),
    Quantize(1, stochastic=True),
    Half(),
    BFloat16(),
]


pytestmark = pytest.mark.usefixtures("one_thread")


every_codec = pytest.mark.parametrize("made", PACKETS, ids=str)
quick = settings(max_examples=25, deadline=None)
few = settings(max_examples=6, deadline=None)


def draw(seed: int, numel: int, shape: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tensors as gradients are, and as they are in bad cases."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if shape == "sparse":
        x[x.abs() < 1.5] = 0
    elif shape == "ties":
        x = x.round()
    elif shape == "heavy":
        x = x**5 * 100
    elif shape == "tiny":
        x = x * 1e-42
    elif shape == "zero":
        x.zero_()
    return x.to(dtype)


SHAPES = ["normal", "sparse", "ties", "heavy", "tiny", "zero"]
tensors = st.builds(draw, st.integers(0, 10**6), st.integers(1, 3000), st.sampled_from(SHAPES))
large = st.builds(draw, st.integers(0, 10**6), st.integers(65_000, 140_000), st.sampled_from(SHAPES))


def passed(made: Codec, x: Tensor, memory: Any = None) -> Tensor:
    """x, as it comes out at the other end."""
    memory = made.init(x) if memory is None else memory
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    made.encode(memory, x.clone(), packet)
    decoded = torch.full_like(x, 7.0)
    made.decode(packet, decoded)
    return decoded


def square(x: Tensor) -> float:
    return x.double().square().sum().item()


# --- the bounds that the docstrings state


@given(st.one_of(tensors, large), st.sampled_from([0.003, 0.1, 0.5, 0.9, 1.0]))
@quick
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


@given(large, st.integers(1, 500))
@few
def test_a_sampled_threshold_finds_no_other_entries(x: Tensor, count: int) -> None:
    found = largest(x, count)
    assert torch.equal(found, found.unique())
    assert found.numel() == min(count, int((x != 0).sum()))
    assert torch.equal(x[found].abs().sort(descending=True).values, x.abs().topk(found.numel()).values)


@given(tensors, st.sampled_from([0.003, 0.1, 0.5, 1.0]), st.integers(0, 50))
@quick
def test_randomk_sends_one_entry_of_each_stretch(x: Tensor, ratio: float, drawn: int) -> None:
    made = RandomK(ratio)
    memory = made.init(x)
    memory.count = drawn
    count = max(1, round(ratio * x.numel()))
    ones = passed(made, torch.ones_like(x), memory)
    assert ones.sum() == count
    ends = [i * x.numel() // count for i in range(count + 1)]
    assert all(ones[a:b].sum() == 1 for a, b in pairwise(ends))
    memory.count = drawn
    assert torch.equal(passed(made, x, memory), x * ones)


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_randomk_in_expectation(ratio: float) -> None:
    x = draw(0, 400, "normal")
    made, fair = RandomK(ratio), RandomK(ratio, unbiased=True)
    memory, other = made.init(x), fair.init(x)
    lost, mean, times = 0.0, torch.zeros_like(x), 1500
    for _ in range(times):
        lost += square(x - passed(made, x, memory)) / times
        mean += passed(fair, x, other) / times
    width = -(-400 // round(ratio * 400))
    assert lost <= (1 - 1 / width) * square(x) * 1.02
    assert lost >= (1 - 1 / (width - 1)) * square(x) * 0.98
    # each entry of the mean has a deviation of |x|·sqrt((width − 1) / times)
    assert ((mean - x).abs() <= 5 * x.abs() * (width / times) ** 0.5).all()


def chunks(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    return x.split({8: 1024, 4: 128, 1: 1024}[bits])


@given(st.one_of(tensors, large), st.sampled_from([8, 4]), st.booleans())
@quick
def test_quantized_entries_are_off_by_half_a_step(x: Tensor, bits: int, stochastic: bool) -> None:
    levels = {8: 127, 4: 7}[bits]
    made = Quantize(bits, stochastic=stochastic)
    for before, after in zip(chunks(x, bits), chunks(passed(made, x), bits), strict=True):
        step = before.abs().max().item() / levels
        off = (before - after).abs().max().item()
        # float32 rounds a step, and twice what is divided by it: by 2⁻²³ · 2 levels of a step
        assert off <= step * ((1.0 if stochastic else 0.5) + 2e-4) or step < 2**-126
        assert off <= before.abs().max().item() * (1 + 1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_steps_too_small_for_a_float_count_as_none(bits: int) -> None:
    """A step of one and a half of the smallest float would be rounded to one."""
    levels = {8: 127, 4: 7}[bits]
    x = torch.full((5,), round(1.49 * levels) * 2.0**-149)
    assert not passed(Quantize(bits), x).any()


@given(st.one_of(tensors, large))
@quick
def test_one_bit_is_the_sign_and_the_mean(x: Tensor) -> None:
    for before, after in zip(chunks(x, 1), chunks(passed(Quantize(1), x), 1), strict=True):
        size = before.double().abs().mean().item()
        assert (after.abs().double() - size).abs().max() <= 1e-5 * size + 1e-44
        assert ((after >= 0) == (before >= 0)).logical_or(before == 0).all()
        lost = square(before) - before.double().abs().sum().item() ** 2 / before.numel()
        assert square(before.double() - after.double()) == pytest.approx(
            lost, rel=1e-4, abs=1e-5 * square(before)
        )


@pytest.mark.parametrize("bits", [8, 4, 1])
def test_stochastic_rounding_is_right_on_average(bits: int) -> None:
    x = draw(1, 300, "normal")
    made = Quantize(bits, stochastic=True)
    memory, times, mean = made.init(x), 1500, torch.zeros(300)
    for _ in range(times):
        mean += passed(made, x, memory) / times
    top = torch.cat([c.abs().max().expand(len(c)) for c in chunks(x, bits)])
    step = top * {8: 1 / 127, 4: 1 / 7, 1: 2.0}[bits]
    assert ((mean - x).abs() <= 5 * step / 2 / times**0.5).all()
    assert not torch.equal(passed(made, x, memory), passed(made, x, memory)), "drawn anew"


@given(tensors)
@quick
def test_half_precision(x: Tensor) -> None:
    off = (x - passed(Half(), x)).abs()
    assert (off <= torch.clamp(x.abs() * 2**-11, min=2**-25))[x.abs() <= 65504].all()
    assert (passed(Half(), x * 1e6)[x.abs() > 1].abs() == 65504).all()
    assert ((x - passed(BFloat16(), x)).abs() <= torch.clamp(x.abs() * 2**-8, min=2**-134)).all()


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
@quick
def test_powersgd_projects(seed: int, rows: int, cols: int, rank: int) -> None:
    made = PowerSGD(rank)
    x = draw(seed, rows * cols, "normal")
    mean = averaged(made, made.wire(x, [Matrix(0, rows, cols)]), x.clone())
    assert square(mean) <= square(x) * 1.0001
    assert square(x - mean) <= square(x) * 1.0001
    assert square(x - mean) == pytest.approx(square(x) - square(mean), abs=1e-4 * square(x))
    if not made.columns(Matrix(0, rows, cols)):
        assert torch.equal(mean, x)


@given(st.integers(0, 10**6), st.integers(1, 4))
@quick
def test_powersgd_sends_low_rank_matrices_whole(seed: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(30, rank, generator=generator) @ torch.randn(rank, 50, generator=generator)
    x = torch.cat([low.flatten(), torch.randn(20, generator=generator)])
    matrices = [Matrix(0, 30, 50), Matrix(1500, 20, 1)]
    mean = averaged(PowerSGD(4), PowerSGD(4).wire(x, matrices), x.clone())
    torch.testing.assert_close(mean, x, rtol=1e-4, atol=1e-4 * x.abs().max().item())
    assert torch.equal(mean[1500:], x[1500:])


def test_powersgd_recovers_from_nothing_and_from_what_is_not_finite() -> None:
    x = draw(0, 600, "normal")
    wire = PowerSGD(2).wire(x, [Matrix(0, 20, 30)])
    assert not averaged(PowerSGD(2), wire, torch.zeros(600)).any()
    assert averaged(PowerSGD(2), wire, torch.full((600,), torch.inf)).isnan().any()
    for _ in range(30):  # power iterations on one matrix find its two largest directions
        mean = averaged(PowerSGD(2), wire, x.clone())
    u, s, v = torch.linalg.svd(x.view(20, 30), full_matrices=False)
    torch.testing.assert_close(mean.view(20, 30), u[:, :2] * s[:2] @ v[:2], rtol=0, atol=0.05)


class Lonely:
    """A port without others."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.lanes: set[Lane] = set()

    def reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Arrived[Tensor]:
        self.lanes.add(lane)
        return Arrived(tensor)

    def gather(self, shares: list[Tensor], lane: Lane = Lane.FRONT) -> Arrived[list[Tensor]]:
        self.lanes.add(lane)
        return Arrived(shares)


def averaged(made: Codec, wire: Any, x: Tensor) -> Tensor:
    port: Any = Lonely()

    async def there_and_back() -> None:
        sent = made.send(wire, x, port)
        await made.land(wire, x, port, await made.turn(wire, x, port, sent))

    block_on(there_and_back())
    assert port.lanes == {wire.lane}
    return x


@pytest.mark.parametrize("made", [TopK(0.1), Half(), PowerSGD(2)], ids=str)
def test_a_wire_keeps_to_its_lane(made: Codec) -> None:
    for coded in (made, ErrorFeedback(made)):
        averaged(
            coded, coded.wire(torch.empty(1200), [Matrix(0, 30, 40)], Lane.BACK), draw(0, 1200, "normal")
        )


# --- error feedback


KEEPING = [made for made in PACKETS if made.contracts]


@pytest.mark.parametrize("inside", [*KEEPING, PowerSGD(2)], ids=str)
def test_nothing_is_lost_only_late(inside: Codec) -> None:
    """All that came and what is kept are all that there was."""
    made = ErrorFeedback(inside)
    size = 1200
    wire = made.wire(torch.empty(size), [Matrix(0, 30, 40)])
    total, came, most = torch.zeros(size).double(), torch.zeros(size).double(), 0.0
    for step in range(50):
        x = draw(step, size, "normal")
        total += x
        most = max(most, square(x) ** 0.5)
        came += averaged(made, wire, x)
        off = (total - came - wire.memory.kept).abs().max().item()
        assert off <= 1e-5 * most
    assert square(wire.memory.kept) ** 0.5 <= 2 * (1 - 0.1) ** 0.5 / 0.1 * most


@every_codec
def test_feeding_back_into_packets_is_feeding_back_into_means(made: Codec) -> None:
    if not made.contracts:
        pytest.skip("refused")
    kept = ErrorFeedback(made)
    memory, wire = kept.init(torch.empty(500)), kept.wire(torch.empty(500))
    for step in range(5):
        x = draw(step, 500, "normal")
        assert torch.equal(passed(kept, x, memory), averaged(kept, wire, x.clone()))
        assert torch.equal(memory.kept, wire.memory.kept)
        assert memory.kept.any()


@pytest.mark.parametrize("inside", [*KEEPING, PowerSGD(2)], ids=str)
def test_what_is_kept_survives_what_is_not_finite(inside: Codec) -> None:
    made = ErrorFeedback(inside)
    wire = made.wire(torch.empty(1200), [Matrix(0, 30, 40)])
    averaged(made, wire, draw(0, 1200, "normal"))
    before = wire.memory.kept.clone()
    spoilt = draw(1, 1200, "normal")
    spoilt[777] = torch.nan
    assert not averaged(made, wire, spoilt).isfinite().all()
    assert torch.equal(wire.memory.kept, before)
    assert averaged(made, wire, draw(2, 1200, "normal")).isfinite().all()


# --- packets


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 2, 127, 1025, 70_001])
def test_every_dtype_and_size(made: Codec, dtype: torch.dtype, numel: int) -> None:
    x = draw(numel, numel, "normal", dtype)
    decoded = passed(made, x)
    assert decoded.isfinite().all()
    packet = torch.empty(made.nbytes(numel, dtype), dtype=torch.uint8)
    made.encode(made.init(x), x.clone(), packet)
    twice = torch.ones_like(x)
    made.add(packet, twice, 2.0)
    near = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    if made.init(x) is None:  # the others draw anew
        torch.testing.assert_close(twice, 1 + 2 * decoded, rtol=near, atol=near * 10)


@every_codec
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("at", [0, 1234, 1999])
def test_what_is_not_finite_is_told(made: Codec, bad: float, at: int) -> None:
    x = draw(3, 2000, "normal")
    x[at] = bad
    assert not passed(made, x).isfinite().all()


@pytest.mark.parametrize(
    ("made", "numel", "dtype", "nbytes"),
    [
        (TopK(0.01), 10_000, torch.float32, 100 * (4 + 2)),
        (TopK(0.01), 65_536, torch.float64, 655 * (8 + 2)),
        (TopK(0.01), 65_537, torch.float32, 655 * (4 + 2) + 2 * 4),
        (TopK(0.01), 10_000_000, torch.float32, 100_000 * (4 + 2) + 153 * 4),
        (TopK(0.01), 3, torch.float16, 4),
        (RandomK(0.01), 10_000, torch.float32, 8 + 400),
        (Quantize(8), 10_240, torch.float32, 10_240 + 40),
        (Quantize(8), 10_241, torch.float64, 10_241 + 88),
        (Quantize(4), 1281, torch.float32, 640 + 1 + 11 * 4),
        (Quantize(1), 1033, torch.float32, 128 + 2 + 2 * 4),
        (Half(), 1000, torch.float32, 2000),
        (BFloat16(), 1000, torch.float64, 2000),
        (ErrorFeedback(TopK(0.01)), 10_000, torch.float32, 600),
    ],
    ids=str,
)
def test_sizes_by_hand(made: Codec, numel: int, dtype: torch.dtype, nbytes: int) -> None:
    assert made.nbytes(numel, dtype) == nbytes


@pytest.mark.parametrize("numel", [10, 70_000])
def test_a_packet_that_no_worker_made_is_refused(numel: int) -> None:
    made = TopK(0.5)
    packet = torch.zeros(made.nbytes(numel, torch.float32), dtype=torch.uint8)
    packet[-2:] = 255  # the last index
    with pytest.raises(OffbeatError, match="packet"):
        made.add(packet, torch.zeros(numel))


def test_a_packet_may_hold_another_number_of_entries() -> None:
    """A ratio that changes from push to push: whoever decodes learns the number from the packet's size."""
    x = draw(0, 1000, "normal")
    packet = torch.empty(TopK(0.2).nbytes(1000, torch.float32), dtype=torch.uint8)
    TopK(0.2).encode(None, x, packet)
    decoded = torch.empty_like(x)
    TopK(0.5).decode(packet, decoded)
    assert torch.equal(decoded, passed(TopK(0.2), x))


# --- as text


@pytest.mark.parametrize("made", [*PACKETS, PowerSGD(rank=2), ErrorFeedback(TopK(0.01))], ids=str)
def test_a_codec_is_what_its_text_says(made: Codec) -> None:
    assert codec(str(made)) == made
    assert codec(repr(made)) == made


def test_how_a_codec_is_written() -> None:
    assert str(ErrorFeedback(TopK(0.01))) == "error_feedback(topk(0.01))"
    assert str(Quantize(4, stochastic=True)) == "quantize(4, stochastic=true)"
    assert str(Half()) == "half"
    assert codec(" PowerSGD ( rank = 2 )") == PowerSGD(2)
    assert codec("bfloat16()") == codec("BFloat16") == BFloat16()
    assert set(CODECS) == {"topk", "randomk", "quantize", "half", "bfloat16", "powersgd", "error_feedback"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topq(0.1)", "unknown codec 'topq'; did you mean 'topk'"),
        ("topk(", "write it like"),
        ("topk(0.1, 2, 3)", "codec topk takes ratio, sampled"),
        ("topk(size=3)", "codec topk takes ratio, sampled"),
        ("0.1", "not a codec"),
        ("topk('x')", "neither a codec, a number"),
        ("topk(*[1])", "neither a codec, a number"),
        ("__import__('os')", "unknown codec|neither"),
        ("topk(0)", "ratio=0: .* above 0 and at most 1"),
        ("topk(1.1)", "ratio=1.1"),
        ("randomk(true)", "ratio=True"),
        ("quantize(2)", "bits=2: 8, 4 or 1"),
        ("powersgd(0)", "rank=0: .* at least 1"),
        ("powersgd(1.5)", "rank=1.5"),
        ("error_feedback(3)", "needs a codec"),
        ("error_feedback(error_feedback(half))", "leaves nothing to keep"),
        ("error_feedback(randomk(0.1, unbiased=true))", "may lose more than there was"),
        ("error_feedback(quantize(1, stochastic=true))", "may lose more than there was"),
    ],
)
def test_what_is_wrong_with_a_text(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        codec(text)
