"""ResNet-18 for images of 32 × 32 (He et al., 2016): a 3 × 3 stem, no pooling before the first stage."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512)
BLOCKS_PER_STAGE = 2


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Build a convolution without bias, followed by batch norm, which has one."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a 1 × 1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(functional.relu(self.first(x)))
        return functional.relu(inner + self.shortcut(x))


def resnet18() -> nn.Module:
    """Build ResNet-18 for ten classes: 11,173,962 parameters."""
    layers: list[nn.Module] = [convolution(3, WIDTHS[0], 3), nn.ReLU()]
    inputs = WIDTHS[0]
    for stage, width in enumerate(WIDTHS):
        for block in range(BLOCKS_PER_STAGE):
            layers.append(ResidualBlock(inputs, width, stride=2 if stage and not block else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))
