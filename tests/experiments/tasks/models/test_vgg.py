"""VGG: its sizes and layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.vgg import STAGES_11, STAGES_19
from tests.support.model_size import parameters


def vgg_parameters(stages: tuple[tuple[int, ...], ...]) -> int:
    """A convolution has 9·in·out weights and out biases, a norm 2·out, the dense layer 512·10 and 10."""
    widths = [3, *(width for stage in stages for width in stage)]
    return sum(9 * i * o + 3 * o for i, o in pairwise(widths)) + 512 * 10 + 10


def test_vgg_has_as_many_layers_as_its_name_says() -> None:
    for stages, layers in ((STAGES_11, 11), (STAGES_19, 19)):
        assert sum(map(len, stages)) + 3 == layers, "and three dense ones, of which 32 × 32 needs one"


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("vgg11", vgg_parameters(STAGES_11)),
        ("vgg11", 9_231_114),
        ("vgg19", vgg_parameters(STAGES_19)),
        ("vgg19", 20_040_522),
    ],
)
def test_vgg_has_its_known_size(model: str, known: int) -> None:
    assert parameters(task("cifar10", model=model).build()) == known


@pytest.mark.parametrize("model", ["vgg11", "vgg19"])
def test_vgg_scores_ten_classes(model: str) -> None:
    net = task("cifar10", model=model).build().eval()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
