"""WeightStore: where the global weights are stored while every worker steps a copy of its own.

Either in slices, one per worker: gradients are reduced to the owners, and each steps its slice with the
user's own optimizer. Or at a parameter server, which has the optimizer: gradients are pushed to it, and it
steps once with the mean of all of them. A strategy pushes and pulls without knowing which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.core.blocks import WHOLE, EvenSlice
from offbeat.core.gradients import copy_gradients, gradient_marks
from offbeat.core.optimizer import LearningRates
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.sharded_optimizer import ShardedOptimizer


@dataclass
class StoreState:
    """A worker's own part of the store, saved with the strategy's state."""

    share: list[Tensor] = field(default_factory=list)  # of the weights, where workers own them
    states: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's, for each piece of the share
    doubtful: bool = False  # whether a gradient was missing in the latest push
    pushed: list[Tensor] = field(default_factory=list)  # the latest gradient that went to a server
    marks: list[float] = field(default_factory=list)  # and which parameters it was for


class WeightStore(ABC):
    """The global weights. All tensors are flat, one for each dtype and device."""

    @abstractmethod
    def room(self) -> list[Tensor]:
        """Allocate zeros to pull the weights into, which lie at the beginning of each tensor."""

    @abstractmethod
    def push(self, port: Port, clock: int, rates: LearningRates, skipped: bool) -> list[Pending[Any]]:
        """Send a copy of the gradients, in the background; zeros if the worker skips this step."""

    @abstractmethod
    def take_in(self, arrived: list[Any], rates: LearningRates) -> None:
        """Step the weights with a push that has arrived from all workers."""

    @abstractmethod
    def pull(
        self, port: Port, into: list[Tensor], clock: int | None, lane: Lane, part: EvenSlice = WHOLE
    ) -> list[Pending[Any]]:
        """Read the weights as they are now, or a part. `clock`: how often this worker has pushed."""

    @abstractmethod
    def spans(self, part: EvenSlice) -> list[list[tuple[int, int]]]:
        """Return where in each tensor a pull of this part writes."""

    @abstractmethod
    def adopt(self, pulled: list[Tensor]) -> None:
        """Copy the pulled weights, which lack the latest push, into the replica."""

    @abstractmethod
    def adopt_own(self, part: EvenSlice = WHOLE) -> None:
        """Copy the weights that this worker owns, with the latest push, into the replica."""


class ShardedStore(WeightStore):
    """The weights in slices, one per worker."""

    def __init__(self, kept: StoreState, replica: Replica, port: Port) -> None:
        self._kept = kept
        self._owned = ShardedOptimizer(replica, port.rank, port.world)
        if not kept.share:
            kept.share, kept.states = self._owned.copy_out()
        self._owned.hold(kept.share, kept.states)

    def room(self) -> list[Tensor]:
        return [shares.zeros() for shares in self._owned.shares]

    def push(self, port: Port, clock: int, rates: LearningRates, skipped: bool) -> list[Pending[Any]]:
        pushes, self._kept.doubtful = self._owned.push(port, skipped)
        return list(pushes)

    def take_in(self, arrived: list[Any], rates: LearningRates) -> None:
        self._owned.step(arrived, rates, self._kept.doubtful)

    def pull(
        self, port: Port, into: list[Tensor], clock: int | None, lane: Lane, part: EvenSlice = WHOLE
    ) -> list[Pending[Any]]:
        return list(self._owned.pull(port, into, lane, part))

    def spans(self, part: EvenSlice) -> list[list[tuple[int, int]]]:
        return [shares.spans(part) for shares in self._owned.shares]

    def adopt(self, pulled: list[Tensor]) -> None:
        self._owned.adopt(pulled)

    def adopt_own(self, part: EvenSlice = WHOLE) -> None:
        self._owned.adopt_own(part)


class ServerStore(WeightStore):
    """The weights at the parameter server."""

    def __init__(self, kept: StoreState, replica: Replica) -> None:
        self._kept = kept
        self._replica = replica
        if not kept.pushed:
            kept.pushed = self.room()

    def room(self) -> list[Tensor]:
        return [torch.zeros_like(weight) for weight in self._replica.weights]

    def push(self, port: Port, clock: int, rates: LearningRates, skipped: bool) -> list[Pending[Any]]:
        kept, replica = self._kept, self._replica
        kept.marks = gradient_marks(replica)
        if skipped:
            torch._foreach_zero_(kept.pushed)
            kept.marks = [0.0] * len(kept.marks)
        else:
            copy_gradients(replica, kept.pushed)
        return [port.server.push(kept.pushed, clock, report=[*rates, *kept.marks])]

    def take_in(self, arrived: list[Any], rates: LearningRates) -> None:
        """Do nothing: the server acknowledges a push when it has stepped."""

    def pull(
        self, port: Port, into: list[Tensor], clock: int | None, lane: Lane, part: EvenSlice = WHOLE
    ) -> list[Pending[Any]]:
        assert part == WHOLE, "a server answers with all that it has"
        return [port.server.pull(into, clock)]

    def spans(self, part: EvenSlice) -> list[list[tuple[int, int]]]:
        return [[part.span(weight.numel(), weight.element_size())] for weight in self._replica.weights]

    def adopt(self, pulled: list[Tensor]) -> None:
        torch._foreach_copy_(self._replica.weights, pulled)

    def adopt_own(self, part: EvenSlice = WHOLE) -> None:
        """Do nothing: the server owns all weights."""
