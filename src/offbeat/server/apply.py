"""Folds: what makes a push part of a server's weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offbeat.server.messages import Push, Tensors

Fold = Callable[[Tensors, Push], None]
Folding = Callable[[Tensors], Fold]  # of these weights


def add(weights: Tensors, push: Push) -> None:
    """The worker's own optimizer made the update."""
    torch._foreach_add_(weights, push.update)
