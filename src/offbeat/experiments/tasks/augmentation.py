"""Augmentation of images: pad, crop and flip at random."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pad_crop_flip(images: Tensor, pad: int = 4) -> Tensor:
    """Pad images with a black border of `pad` pixels, crop each at a random place, and mirror half of them.

    All images are handled at once, by indices, with draws from the global generator of their device.
    """
    count, channels, height, width = images.shape
    device = images.device
    down, right = torch.randint(2 * pad + 1, (2, count, 1), device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    rows = down + torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    columns = right + torch.where(mirrored, columns.flip(0), columns)
    sample = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    padded = functional.pad(images, (pad,) * 4)
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
