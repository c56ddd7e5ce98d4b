"""ResNet-18: its size, its blocks and the shape of its output."""

from __future__ import annotations

import torch

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.models.resnet import ResidualBlock
from tests.support.model_size import parameters


def test_resnet_halves_the_image_three_times_and_has_eight_blocks() -> None:
    net = task("cifar10").build()
    assert sum(isinstance(module, ResidualBlock) for module in net.modules()) == 8
    assert net[:-3].eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


def test_resnet_has_its_known_size() -> None:
    assert parameters(task("cifar10", model="resnet18").build()) == 11_173_962


def test_resnet_scores_ten_classes() -> None:
    net = task("cifar10", model="resnet18").build().eval()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
