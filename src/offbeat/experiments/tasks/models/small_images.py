"""Models for small grey images, without dropout or batch norm: the weights are the whole state."""

from torch import nn


def digits_cnn() -> nn.Module:
    """Build two convolutions and two dense layers for 8 × 8 images: 43,050 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def digits_mlp() -> nn.Module:
    """Build a 64-32-10 network for 8 × 8 images and thousands of virtual workers: 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 8, 32), nn.ReLU(), nn.Linear(32, 10))


def lenet5() -> nn.Module:
    """Build LeNet-5 with ReLU and max pooling; padding 2 replaces its 32 × 32 input: 61,706 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def mlp() -> nn.Module:
    """Build a 784-512-512-10 network for 28 × 28 images: 669,706 parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(28 * 28, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def cnn() -> nn.Module:
    """Build the classical MNIST network without its dropout: 1,199,882 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
