"""The size of a model."""

from __future__ import annotations

from torch import nn


def parameters(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())
