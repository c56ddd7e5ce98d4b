"""VGG-11 and VGG-19 with batch norm for images of 32 × 32 (Simonyan & Zisserman, 2015).

The convolutions are the paper's configurations A and E. At 32 × 32 their output is a single point of 512
channels, so one dense layer takes the place of three.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

STAGES_11 = ((64,), (128,), (256,) * 2, (512,) * 2, (512,) * 2)
STAGES_19 = ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)


def vgg(stages: tuple[tuple[int, ...], ...]) -> nn.Module:
    """Build a VGG network of these stages, each a tuple of output channels."""
    layers: list[nn.Module] = []
    last = 3
    for stage in stages:
        for inputs, outputs in pairwise((last, *stage)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        last = stage[-1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(last, 10))


def vgg11() -> nn.Module:
    """Build VGG-11."""
    return vgg(STAGES_11)


def vgg19() -> nn.Module:
    """Build VGG-19."""
    return vgg(STAGES_19)
