"""Folds: what makes a push part of a server's weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offbeat.server.messages import Push, Tensors

ApplyUpdate = Callable[[Tensors, Push], None]
MakeApply = Callable[[Tensors], ApplyUpdate]  # of these weights


def add_update(weights: Tensors, push: Push) -> None:
    """The worker's own optimizer made the update."""
    torch._foreach_add_(weights, push.update)
