"""Models for small images: their sizes, and weights that follow the seed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.experiments.tasks import task
from tests.support.model_size import parameters


@pytest.mark.parametrize(
    ("name", "model", "parameters"),
    [
        ("digits", "cnn", (9 + 1) * 32 + (32 * 9 + 1) * 32 + (512 + 1) * 64 + (64 + 1) * 10),
        ("digits", "mlp", (64 + 1) * 32 + (32 + 1) * 10),
        ("mnist", "mlp", 669_706),
        ("mnist", "cnn", 1_199_882),
        # LeCun et al. 1998 (C1, C3, C5, F6, output), but C3 sees all six maps, and the output layer is dense
        (
            "mnist",
            "lenet5",
            (25 + 1) * 6 + (6 * 25 + 1) * 16 + (400 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10,
        ),
    ],
)
def test_models_have_their_size_and_follow_the_seed(name: str, model: str, parameters: int) -> None:
    chosen = task(name, model=model)
    torch.manual_seed(5)
    first, second = chosen.build(), chosen.build()
    torch.manual_seed(5)
    again = chosen.build()
    weights = [nn.utils.parameters_to_vector(built.parameters()) for built in (first, second, again)]
    assert weights[0].numel() == parameters
    assert torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[1])
    side = 8 if name == "digits" else 28
    assert first(torch.zeros(3, 1, side, side)).shape == (3, 10)


def test_lenet_has_its_known_size() -> None:
    assert parameters(task("mnist", model="lenet5").build()) == 61_706
