"""Moments of the user's training loop that a strategy can await, and that the conductor fires."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from offbeat.core.hidden_gradients import HiddenGradients
from offbeat.core.pending import Pending
from offbeat.errors import OffbeatError


class StepMoment(IntEnum):
    """The moments of a step, in the order in which they occur."""

    BEFORE_UPDATE = 1  # the optimizer is about to step
    AFTER_UPDATE = 2  # the optimizer has stepped


class Moment(Pending[bool]):
    """A moment of one step, awaited by a strategy and fired by the conductor.

    Its value is whether the optimizer stepped: `False` when, for example, a GradScaler skipped it.
    Gradients that are `hidden` from the loop until then are shown before the strategy resumes. A strategy
    that `averages` afterwards may replace the weights, which a backward in progress must not see.
    """

    def __init__(
        self,
        when: StepMoment,
        hidden: HiddenGradients | None = None,
        before: Callable[[], None] | None = None,
        averages: bool = False,
    ) -> None:
        self.when = when
        self.hidden = hidden
        self.before = before  # is called when the optimizer is about to step
        self.averages = averages
        self._happened: bool | None = None

    def done(self) -> bool:
        return self._happened is not None

    def result(self) -> bool:
        assert self._happened is not None
        return self._happened

    def wait(self) -> None:
        raise OffbeatError(f"only the training loop can fire the moment {self.when.name}")

    def fire(self, happened: bool) -> None:
        """Resolve the moment; the conductor then resumes the step."""
        self._happened = happened
        if self.hidden is not None:
            self.hidden.show()
