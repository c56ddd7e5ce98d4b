"""SparseLoCo: dense it is LocalSGD or DiLoCo with outer SGD; sparse it follows its rule, worked out apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import DiLoCo, LocalSGD, SettingError, SparseLoCo
from offbeat.experiments.tasks.base import Batch
from tests.support.virtual_runs import Kept, cluster_of, play

pytestmark = pytest.mark.virtual

DENSE: dict[str, Any] = {"ratio": 1.0, "bits": None}
THREE = cluster_of(0.1, 0.1, 0.1)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_dense_it_is_local_sgd(decay: float) -> None:
    ours = play(THREE, SparseLoCo(period=3, decay=decay, **DENSE), 10)
    for one, other in zip(ours.weights, play(THREE, LocalSGD(period=3), 10).weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("delay", [0, 2])
def test_or_diloco_with_outer_sgd(delay: int) -> None:
    ours = play(THREE, SparseLoCo(period=3, outer_lr=0.6, delay=delay, **DENSE), 10)
    diloco = play(THREE, DiLoCo(period=3, outer_lr=0.6, outer_momentum=0.0, delay=delay), 10)
    for one, other in zip(ours.weights, diloco.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


class Pulled(Kept):
    """Worker i's gradient is w − c_i, without noise."""

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        w = model.get_parameter("w")
        w.grad = w.detach() - centres()[[model is other for other in self.built].index(True)]
        return torch.zeros(())


def centres() -> Tensor:
    return torch.randn(3, 1008, generator=torch.Generator().manual_seed(5))


def test_the_rule_worked_out_apart() -> None:
    """Four exchanges of two steps each, a quarter of each 100 entries, as they are."""
    lr, beta, outer_lr, chunk, count = 0.1, 0.8, 0.7, 100, 25
    size = 1008  # all weights: the last chunk has 8, of which 2 are sent
    w_global, kept = torch.ones(size), torch.zeros(3, size)
    for _ in range(4):
        sent = torch.zeros(size)
        for i in range(3):
            w = w_global.clone()
            for _ in range(2):
                w -= lr * (w - centres()[i])
            kept[i] = beta * kept[i] + (w_global - w)
            for part in range(0, size, chunk):
                here = kept[i, part : part + chunk]
                largest = here.abs().topk(count if len(here) == chunk else 2).indices
                sent[part + largest] += here[largest] / 3
                here[largest] = 0
        w_global -= outer_lr * sent
    strategy = SparseLoCo(period=2, outer_lr=outer_lr, decay=beta, ratio=0.25, chunk=chunk, bits=None)
    run = play(THREE, strategy, 8, task=Pulled(dimension=size, lr=lr))
    for weights in run.weights:
        torch.testing.assert_close(weights, w_global, rtol=0, atol=1e-6)


def test_two_bits_of_a_fiftieth_are_sent() -> None:
    """Of 1008 weights 20: 5 bytes of values, a scale, 1 to be even, 2 bytes an index; twice to two others."""
    run = play(THREE, SparseLoCo(period=4), 8)
    assert run.each("bytes_sent") == [2 * 2 * (5 + 4 + 1 + 20 * 2)] * 3


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"period": 4, "delay": 4}, "delay=4"),
        ({"decay": 1.1}, "decay=1.1"),
        ({"ratio": 0}, "ratio=0"),
        ({"bits": 3}, "bits=3"),
        ({"chunk": 0}, "chunk=0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings_: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        SparseLoCo(**settings_)
