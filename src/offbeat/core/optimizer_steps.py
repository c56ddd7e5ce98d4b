"""Record of which of the user's optimizers have stepped since the last backward.

A step of a strategy ends when every optimizer whose parameters have gradients has stepped. Where the loop
leaves one of them out (two networks that are trained in turn), the step ends when the next forward begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from offbeat.core.accumulation import mark
from offbeat.errors import OffbeatError


class OptimizerSteps:
    """The optimizers that are expected to step, and those that have."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._expected: set[int] = set()
        self._stepped: set[int] = set()
        self._marks: dict[int, list[tuple[int, int] | None]] = {}
        self.is_first = True  # no optimizer is about to step yet

    def begin(self, stepped: Sequence[Optimizer] = ()) -> None:
        """Begin a step; these optimizers have stepped already, inside backward."""
        self._stepped = set(map(id, stepped)) if stepped else set()
        self._expected = self._stepped.copy()
        self._marks.clear()
        self.is_first = True

    def expect(self) -> None:
        """Expect every optimizer whose parameters have a gradient now, besides those expected before."""
        if len(self._expected) < len(self._optimizers):
            for each in self._optimizers:
                if has_gradients(each):
                    self._expected.add(id(each))

    @property
    def any_stepped(self) -> bool:
        return bool(self._stepped)

    @property
    def all_stepped(self) -> bool:
        return self._stepped >= self._expected

    def record(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped."""
        self._stepped.add(id(optimizer))

    def check_unchanged(self, optimizer: Optimizer) -> None:
        """Raise an error if an optimizer's gradients changed since the first optimizer was about to step.

        A strategy reads all gradients just before the first optimizer steps. If those of a later one change
        after that (are unscaled or clipped only then), the strategy has read others than the optimizer does.
        """
        if not self._marks:
            self._marks = {id(each): _marks(each) for each in self._optimizers}
        elif self._marks[id(optimizer)] != _marks(optimizer):
            raise OffbeatError(
                f"the gradients of the second optimizer ({type(optimizer).__name__}) changed after the first "
                "had stepped, but this strategy has read all gradients by then: unscale and clip the "
                "gradients of all optimizers before the first of them steps"
            )


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of the optimizer has a gradient."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                return True
    return False


def with_gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of the optimizer that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _marks(optimizer: Optimizer) -> list[tuple[int, int] | None]:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [None if grad is None else mark(grad) for grad in grads]
