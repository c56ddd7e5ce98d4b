"""The kernels for a GPU, run without one by Triton's interpreter: they do what torch's operations do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat import Codec, Half, Quantize, RandomK, TopK
from offbeat.codecs.cuda import ops
from tests.support.coding import draw

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize(
    "made", [Quantize(8), Quantize(4), Quantize(1), Half(), RandomK(0.01), TopK(0.01)], ids=str
)
def test_packets_mean_the_same_to_torch(made: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(7, 70_001, "heavy")
    by_kernels, sum_by_kernels = encoded(made, x), torch.ones_like(x)
    made.accumulate(by_kernels, sum_by_kernels, -0.5)
    monkeypatch.setattr(ops, "supports", lambda entries: False)
    by_torch, sum_by_torch = encoded(made, x), torch.ones_like(x)
    if made != Quantize(1):  # whose scales are means, added up in another order
        assert torch.equal(by_kernels, by_torch)
    made.accumulate(by_kernels, sum_by_torch, -0.5)
    assert torch.equal(sum_by_kernels, sum_by_torch)
    decoded = [torch.empty_like(x), torch.empty_like(x)]
    for packet, into in zip((by_kernels, by_torch), decoded, strict=True):
        made.decode(packet, into)
    torch.testing.assert_close(*decoded, rtol=1e-6, atol=0)


def encoded(made: Codec, x: Tensor) -> Tensor:
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8)
    made.encode(made.init(x), x.clone(), packet)
    return packet
