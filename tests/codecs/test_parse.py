"""Codecs as text: what a text stands for, how a codec is written, and what is refused."""

from __future__ import annotations

import pytest

from offbeat import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, TopK
from offbeat.codecs import CODECS, codec
from offbeat.errors import SettingError
from tests.support.coding import PACKETS


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
        ("topk(0.1, true, 2, 2, 3)", "codec topk takes ratio, sampled"),
        ("topk(size=3)", "codec topk takes ratio, sampled"),
        ("0.1", "not a codec"),
        ("topk('x')", "neither a codec, a number"),
        ("topk(*[1])", "neither a codec, a number"),
        ("__import__('os')", "unknown codec|neither"),
        ("topk(0)", "ratio=0: .* above 0 and at most 1"),
        ("topk(1.1)", "ratio=1.1"),
        ("randomk(true)", "ratio=True"),
        ("quantize(3)", "bits=3: choose one of 8, 4, 2, 1"),
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
