"""Gradient accumulation: does a backward add to the gradients of the last one, or start from none?

A backward that comes before the optimizer has stepped means one of two things. Either the loop accumulates
gradients over several backwards, and the step has not ended; or the optimizer was skipped (a GradScaler found
an overflow), the gradients were cleared, and a new step begins. The gradients themselves tell: those that the
backward has not reached yet are still as the loop left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor, nn

SAMPLES = 3  # gradients that are remembered: almost always, the first one that is looked at again decides


class AccumulationDetector:
    """The gradients at the end of a backward, to be compared with those that the next backward finds."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._seen: dict[nn.Parameter, tuple[int, int]] = {}

    def remember(self) -> None:
        """Remember some of the gradients that the loop can see, by their marks: none is held in memory."""
        seen = ((param, mark(param.grad)) for param in self._params if param.grad is not None)
        self._seen = dict(islice(seen, SAMPLES))

    def is_added_to(self, first: nn.Parameter) -> bool:
        """Return whether the backward that has just reached `first`, and nothing else, adds to gradients."""
        others = [param for param in self._seen if param is not first]
        for param in others:
            if param.grad is None:
                return False
            if mark(param.grad) == self._seen[param] or bool(param.grad.any()):
                return True
        if others:  # these were set to zero, or have become zero: what of all others?
            rest = (p.grad for p in self._params if p is not first and p not in self._seen)
            return any(grad is not None and bool(grad.any()) for grad in rest)
        if first not in self._seen or first.grad is None:
            return False  # there were no gradients
        # A single parameter: an addition in place is one change of the same memory, a cleared gradient more.
        data_ptr, version = self._seen[first]
        return mark(first.grad) == (data_ptr, version + 1)


def mark(grad: Tensor) -> tuple[int, int]:
    """Return the gradient's place in memory and how often it was changed: no value is read."""
    return 0 if grad.is_sparse else grad.data_ptr(), grad._version
