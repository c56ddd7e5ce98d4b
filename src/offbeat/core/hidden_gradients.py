"""Gradients that are hidden from the user's loop and its optimizers for a part of a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class HiddenGradients:
    """Gradients of some parameters, which read `grad = None` until they are shown again."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._grads = [param.grad for param in params]
        for param in params:
            param.grad = None

    def show(self) -> None:
        """Show the gradients again, except where the next step's have come already."""
        for param, grad in zip(self._params, self._grads, strict=True):
            if param.grad is None:
                param.grad = grad

    def clear(self) -> None:
        """Drop the gradients, as the loop has dropped the visible ones: the next backward adds to none."""
        self._params, self._grads = [], []

    def show_for_accumulation(self) -> None:
        """Show the gradients again while a backward adds to them; what it has computed so far is added."""
        for param, grad in zip(self._params, self._grads, strict=True):
            if grad is not None and param.grad is not None:
                grad.add_(param.grad)
            param.grad = param.grad if grad is None else grad
