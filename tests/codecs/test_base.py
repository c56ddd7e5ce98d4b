"""Codecs: what a packet holds, how large it is, which ones are refused; and a codec as text."""

from __future__ import annotations

import pytest
import torch

from offbeat import BFloat16, Codec, ErrorFeedback, Half, OffbeatError, PowerSGD, Quantize, RandomK, TopK
from offbeat.codecs import CODECS, codec
from offbeat.errors import SettingError
from tests.support.coding import PACKETS, draw, every_codec, passed

pytestmark = pytest.mark.usefixtures("one_thread")


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 2, 127, 1025, 270_001])
def test_every_dtype_and_size(made: Codec, dtype: torch.dtype, numel: int) -> None:
    x = draw(numel, numel, "normal", dtype)
    decoded = passed(made, x)
    assert decoded.isfinite().all()
    packet = torch.empty(made.nbytes(numel, dtype), dtype=torch.uint8)
    made.encode(made.init(x), x.clone(), packet)
    twice = torch.ones_like(x)
    made.accumulate(packet, twice, 2.0)
    near = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    if made.init(x) is None:  # the others draw anew
        torch.testing.assert_close(twice, 1 + 2 * decoded, rtol=near, atol=near * 10)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_to_take_is_to_encode_and_subtract(made: Codec, dtype: torch.dtype) -> None:
    x = draw(5, 3001, "normal", dtype)
    x[:300] = 0
    rest, taken = x.clone(), x.clone()
    packet, other = (torch.empty(made.nbytes(3001, dtype), dtype=torch.uint8) for _ in range(2))
    made.encode(made.init(x), rest, packet)
    if not isinstance(made, ErrorFeedback):  # which has done so already
        made.accumulate(packet, rest, -1.0)
    made.encode_residual(made.init(x), taken, other)
    assert torch.equal(packet, other)
    assert torch.equal(taken, rest)


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
        made.accumulate(packet, torch.zeros(numel))


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
        ("topk(", "write a codec like"),
        ("topk(0.1, 2, 3)", "codec topk takes ratio, sampled"),
        ("topk(size=3)", "codec topk takes ratio, sampled"),
        ("0.1", "not a codec"),
        ("topk('x')", "neither a codec, a number"),
        ("topk(*[1])", "neither a codec, a number"),
        ("__import__('os')", "unknown codec|neither"),
        ("topk(0)", "ratio=0: .* above 0 and at most 1"),
        ("topk(1.1)", "ratio=1.1"),
        ("randomk(true)", "ratio=True"),
        ("quantize(2)", "bits=2: choose one of 8, 4, 1"),
        ("powersgd(0)", "rank=0: .* at least 1"),
        ("powersgd(1.5)", "rank=1.5"),
        ("error_feedback(3)", "needs an inner codec"),
        ("error_feedback(error_feedback(half))", "leaves no error"),
        ("error_feedback(randomk(0.1, unbiased=true))", "error may be larger than the tensor"),
        ("error_feedback(quantize(1, stochastic=true))", "error may be larger than the tensor"),
    ],
)
def test_what_is_wrong_with_a_text(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        codec(text)
