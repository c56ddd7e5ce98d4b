"""Weight stores: the places of the global weights, while every worker steps a copy of its own.

ShardedStore   with the workers, one slice each: gradients are reduced to the owners, and each owner lets the
               user's own optimizer step its slice
ServerStore    at a parameter server, which has the optimizer: gradients are pushed to the server, which steps
               once with the mean of all of them

The strategy pushes and pulls without knowing which store it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.gradients import copy_gradients, gradient_marks
from offbeat.core.optimizer import LearningRates
from offbeat.core.partition import WHOLE, EvenSlice
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.parcels import Parcels, ParcelState, ServerParcels, ShardedParcels
from offbeat.strategies.ssd_sgd.sharded_optimizer import ShardedOptimizer


@dataclass
class StoreState:
    """A worker's own part of a store; a part of SSD-SGD's state."""

    own_slices: list[Tensor] = field(default_factory=list)  # of the weights, where workers own them
    states: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's, by ParamShard
    missing: list[int] = field(default_factory=list)  # parameters without a gradient in the latest push
    pushed: list[Tensor] = field(default_factory=list)  # the gradient in the latest push to a server


class WeightStore(ABC):
    """The global weights. All tensors are flat, one per dtype and device."""

    def __init__(self, state: StoreState, replica: Replica) -> None:
        self._state = state
        self._replica = replica
        groups = replica.flat_groups().values()
        self._params = [param for blocks in groups for block in blocks for param in block.params]
        self._numbers = {param: number for number, param in enumerate(self._params)}

    @property
    def missing(self) -> list[nn.Parameter]:
        """The parameters that had no gradient here in the latest push."""
        return [self._params[number] for number in self._state.missing]

    def free_replica_state(self) -> None:
        """Free the state of the user's optimizer for the replica's parameters, if it steps them no more."""
        for param in self._params:
            self._replica.optimizer.forget(param)

    @abstractmethod
    def parcels(self, state: ParcelState) -> Parcels:
        """Return the parcels in which weights travel together with the optimizer's state."""

    @abstractmethod
    def zeros(self) -> list[Tensor]:
        """Allocate tensors to pull the weights into; each begins with the weights, and padding may follow."""

    @abstractmethod
    def push(self, port: Port, clock: int, rates: LearningRates, skipped: bool) -> list[Pending[Any]]:
        """Send a copy of the gradients, in the background; zeros if this worker skips the step."""

    @abstractmethod
    def finish_push(self, arrived: list[Any], rates: LearningRates) -> None:
        """Step the weights, now that all workers' pushes have arrived."""

    @abstractmethod
    def pull(
        self, port: Port, into: list[Tensor], clock: int | None, lane: Lane, part: EvenSlice = WHOLE
    ) -> list[Pending[Any]]:
        """Read the weights as they are now, or a part. `clock`: how often this worker has pushed."""

    @abstractmethod
    def read(self, port: Port, into: list[Tensor]) -> list[Pending[Any]]:
        """Read the weights as they are now, for evaluation."""

    @abstractmethod
    def spans(self, part: EvenSlice) -> list[list[tuple[int, int]]]:
        """Return, for each tensor, where a pull of this part writes."""

    @abstractmethod
    def load_pulled(self, pulled: list[Tensor]) -> None:
        """Copy pulled weights, which lack the latest push, to the replica."""

    @abstractmethod
    def load_own(self) -> None:
        """Copy the weights that this worker owns to the replica, with the latest push."""


class ShardedStore(WeightStore):
    """The global weights, divided among the workers."""

    def __init__(self, state: StoreState, replica: Replica, port: Port, parts: int = 1) -> None:
        super().__init__(state, replica)
        self._optimizer = ShardedOptimizer(replica, port, parts)
        if not state.own_slices:
            state.own_slices, state.states = self._optimizer.copy_out()
        self._optimizer.bind(state.own_slices, state.states)

    def parcels(self, state: ParcelState) -> Parcels:
        return ShardedParcels(state, self._replica, self._optimizer)

    def zeros(self) -> list[Tensor]:
        return [partition.zeros() for partition in self._optimizer.partitions]

    def push(self, port: Port, clock: int, rates: LearningRates, skipped: bool) -> list[Pending[Any]]:
        pushes, missing = self._optimizer.push(port, skipped)
        self._state.missing = [self._numbers[param] for param in missing]
        return list(pushes)

    def finish_push(self, arrived: list[Any], rates: LearningRates) -> None:
        self._optimizer.step(arrived, rates, bool(self._state.missing))

    def pull(
        self, port: Port, into: list[Tensor], clock: int | None, lane: Lane, part: EvenSlice = WHOLE
    ) -> list[Pending[Any]]:
        return list(self._optimizer.pull(port, into, lane, part))

    def read(self, port: Port, into: list[Tensor]) -> list[Pending[Any]]:
        return self.pull(port, into, None, Lane.FRONT)

    def spans(self, part: EvenSlice) -> list[list[tuple[int, int]]]:
        return [partition.spans(part) for partition in self._optimizer.partitions]

    def load_pulled(self, pulled: list[Tensor]) -> None:
        self._optimizer.load_pulled(pulled)

    def load_own(self) -> None:
        self._optimizer.load_own()


class ServerStore(WeightStore):
    """The global weights, at the parameter server."""

    def __init__(self, state: StoreState, replica: Replica) -> None:
        super().__init__(state, replica)
        if not state.pushed:
            state.pushed = self.zeros()

    def parcels(self, state: ParcelState) -> Parcels:
        return ServerParcels(state, self._replica, self._state.pushed)

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(weight) for weight in self._replica.weights]

    def push(self, port: Port, clock: int, rates: LearningRates, skipped: bool) -> list[Pending[Any]]:
        state, replica = self._state, self._replica
        replica.optimizer.check_settings("ssd_sgd")
        marks = gradient_marks(replica)
        if skipped:
            torch._foreach_zero_(state.pushed)
            marks = [0.0] * len(marks)
        else:
            copy_gradients(replica, state.pushed)
        state.missing = [number for number, mark in enumerate(marks) if not mark]
        return [port.server.push(state.pushed, clock, report=[*rates, *marks])]

    def finish_push(self, arrived: list[Any], rates: LearningRates) -> None:
        """Do nothing: the server acknowledges a push when it has stepped."""

    def pull(
        self, port: Port, into: list[Tensor], clock: int | None, lane: Lane, part: EvenSlice = WHOLE
    ) -> list[Pending[Any]]:
        assert part == WHOLE, "a server answers a pull with all of its weights"
        return [port.server.pull(into, clock)]

    def read(self, port: Port, into: list[Tensor]) -> list[Pending[Any]]:
        return [port.server.read(into)]

    def spans(self, part: EvenSlice) -> list[list[tuple[int, int]]]:
        return [[part.bounds(weight.numel(), weight.element_size())] for weight in self._replica.weights]

    def load_pulled(self, pulled: list[Tensor]) -> None:
        torch._foreach_copy_(self._replica.weights, pulled)

    def load_own(self) -> None:
        """Do nothing: this worker owns no weights."""
