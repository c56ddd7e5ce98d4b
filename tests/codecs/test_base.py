"""Codecs: what a packet holds, how large it is, that infinities survive it, and on which lane it travels."""

from __future__ import annotations

import pytest
import torch

from offbeat import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, RandomK, TopK
from offbeat.core.blocks import Matrix
from offbeat.core.port import Lane
from tests.support.coding import averaged, draw, every_codec, passed


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


@every_codec
def test_what_cuts_anywhere_sends_no_more_in_pieces_and_errs_within_the_same_bound(made: Codec) -> None:
    x = draw(7, 1 << 18, "heavy")
    pieces = x.split(1 << 13)
    whole, cut = made.nbytes(x.numel(), x.dtype), sum(made.nbytes(p.numel(), p.dtype) for p in pieces)
    assert cut <= 1.005 * whole or not made.cuts_anywhere, "but for counts and seeds"
    if isinstance(made, TopK) and made.bits is None:
        error = sum(float((passed(made, piece) - piece).square().sum()) for piece in pieces)
        assert made.cuts_anywhere
        assert error <= (1 - made.ratio) * float(x.square().sum())


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
        (Quantize(2), 1033, torch.float32, 256 + 3 + 2 * 4),
        (TopK(0.1, chunk=64), 200, torch.float32, (3 * 6 + 1) * (4 + 1)),  # 8 entries are left: one
        (TopK(0.1, chunk=300), 700, torch.float32, (2 * 30 + 10) * (4 + 2)),
        (TopK(0.1, chunk=300, bits=2), 650, torch.float32, 65 * 2 + 17 + 4 + 1),  # one to be even
        (TopK(1.0, chunk=255, bits=8), 300, torch.float64, 300 * 2 + 8),
        (Quantize(1), 1033, torch.float32, 128 + 2 + 2 * 4),
        (Half(), 1000, torch.float32, 2000),
        (BFloat16(), 1000, torch.float64, 2000),
        (ErrorFeedback(TopK(0.01)), 10_000, torch.float32, 600),
    ],
    ids=str,
)
def test_sizes_by_hand(made: Codec, numel: int, dtype: torch.dtype, nbytes: int) -> None:
    assert made.nbytes(numel, dtype) == nbytes


@pytest.mark.parametrize("made", [TopK(0.1), Half(), PowerSGD(2)], ids=str)
def test_a_wire_keeps_to_its_lane(made: Codec) -> None:
    for coded in (made, ErrorFeedback(made)):
        averaged(
            coded, coded.stream(torch.empty(1200), [Matrix(0, 30, 40)], Lane.BACK), draw(0, 1200, "normal")
        )
