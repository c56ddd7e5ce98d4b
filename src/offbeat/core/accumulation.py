"""Gradient accumulation: does a backward add to the gradients of the last one, or start from none?

A backward that comes before the optimizer has stepped means one of two things. Either the loop accumulates
gradients over several backwards, and the step has not ended; or the optimizer was skipped (a GradScaler found
an overflow), the gradients were cleared, and a new step begins. The gradients themselves tell: those that the
backward has not reached yet are still as the loop left them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class AccumulationDetector:
    """The gradients at the end of a backward, to be compared with those that the next backward finds."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._seen: dict[nn.Parameter, tuple[int, int]] = {}

    def remember(self) -> None:
        """Remember which parameters have a gradient that the loop can see. Holds no gradient in memory."""
        self._seen = {param: mark(param.grad) for param in self._params if param.grad is not None}

    def is_added_to(self, first: nn.Parameter) -> bool:
        """Return whether the backward that has just reached `first`, and nothing else, adds to gradients."""
        others = [param for param in self._seen if param is not first]
        for param in others:
            if param.grad is None:
                return False
            if mark(param.grad) == self._seen[param] or bool(param.grad.any()):
                return True
        if others or first not in self._seen or first.grad is None:
            return False  # all gradients were set to zero, or there were none
        # A single parameter: an addition in place is one change of the same memory, a cleared gradient more.
        data_ptr, version = self._seen[first]
        return mark(first.grad) == (data_ptr, version + 1)


def mark(grad: Tensor) -> tuple[int, int]:
    """Return the gradient's place in memory and how often it was changed: no value is read."""
    return 0 if grad.is_sparse else grad.data_ptr(), grad._version
