"""The quadratic task: its gradient is its loss's, its optimum is where it says, bad settings are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from offbeat.errors import SettingError
from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.quadratic import FLATTEST, Quadratic


def _batch(size: int = 8) -> tuple[torch.Tensor, ...]:
    return (torch.arange(size),)


@pytest.mark.parametrize("noise", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("dimension", [1, 7, 1000])
def test_the_closed_form_is_the_gradient_of_the_loss(dimension: int, noise: float) -> None:
    quadratic = Quadratic(dimension=dimension, noise=noise)
    ours, autograd = quadratic.build(), quadratic.build()
    for model in (ours, autograd):
        torch.manual_seed(1)
        torch.nn.init.normal_(model.get_parameter("w"))
    torch.manual_seed(2)
    loss = quadratic.gradient(ours, _batch())
    torch.manual_seed(2)
    expected = quadratic.loss(autograd, _batch())
    expected.backward()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(ours.get_parameter("w").grad, autograd.get_parameter("w").grad)


def test_gradients_add_up_as_autograd_s_do() -> None:
    quadratic = Quadratic(dimension=5, noise=0.0)
    model = quadratic.build()
    quadratic.gradient(model, _batch())
    once = model.get_parameter("w").grad.clone()
    quadratic.gradient(model, _batch())
    assert torch.equal(model.get_parameter("w").grad, 2 * once)


def test_the_noise_falls_with_the_square_root_of_the_batch() -> None:
    quadratic = Quadratic(dimension=40_000, noise=3.0)
    still = Quadratic(dimension=40_000, noise=0.0)
    for size in (1, 16):
        noisy_model, still_model = quadratic.build(), still.build()
        torch.manual_seed(0)
        quadratic.gradient(noisy_model, _batch(size))
        still.gradient(still_model, _batch(size))
        noise = noisy_model.get_parameter("w").grad - still_model.get_parameter("w").grad
        # a deviation drawn from n numbers is off by 1/√(2n) of itself; five times that is ample
        expected = 3.0 / math.sqrt(size)
        assert noise.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * 40_000))


def test_it_falls_to_its_optimum_as_the_curvatures_say() -> None:
    quadratic = Quadratic(dimension=10, noise=0.0, lr=0.5)
    model, data = quadratic.build(), quadratic.load()
    optimizer = quadratic.optimizer(model)
    curvatures = torch.linspace(1.0, FLATTEST, 10)
    assert quadratic.evaluate(model, data) == pytest.approx(0.5 * curvatures.sum().item())
    for _ in range(20):
        optimizer.zero_grad()
        quadratic.gradient(model, _batch())
        optimizer.step()
    torch.testing.assert_close(model.get_parameter("w").detach(), (1 - 0.5 * curvatures) ** 20)
    for _ in range(600):
        optimizer.zero_grad()
        quadratic.gradient(model, _batch())
        optimizer.step()
    assert quadratic.evaluate(model, data) < 1e-10
    assert not list(data.test_batches())
    assert len(data) == quadratic.samples
    assert data.to("cpu") is data


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"dimension": 0}, "dimension"),
        ({"samples": 0}, "samples"),
        ({"noise": -1.0}, "noise"),
        ({"noise": math.inf}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"model": "line"}, "point"),
        ({"dimensions": 3}, "dimension"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingError, match=word):
        task("quadratic", **settings)
