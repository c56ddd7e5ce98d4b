"""End of a step through a framework: when all optimizers were called, though a GradScaler skipped them.

The next backward would end a skipped step as well. But frameworks exchange something of their own before it
(Lightning asks before each batch whether to stop). A rank whose scaler skipped would wait there for the
others, and those whose scalers did not wait for this one's part in their step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from offbeat.attach import Sync


class OptimizerCalls:
    """The optimizers that a framework has called in the step in progress."""

    def __init__(self, sync: Sync, count: int) -> None:
        self._sync = sync
        self._count = count
        self._called: set[int] = set()
        self._clock = sync.clock

    @contextmanager
    def of(self, optimizer: Optimizer) -> Iterator[None]:
        """Record a call, which is made in this context; the last optimizer's ends the step."""
        clock = self._sync.clock
        if clock != self._clock:
            self._called.clear()
            self._clock = clock
        yield
        if self._sync.clock != clock and self._count > 1:  # the call itself has ended the step
            return
        self._called.add(id(optimizer))
        if len(self._called) == self._count:
            self._called.clear()
            self._sync.end_step()
