"""Follower: a copy of a shard's state that follows its journal, and gives the state back after a crash."""

from __future__ import annotations

from offbeat.server.aggregation import RunningMean
from offbeat.server.apply import MakeApply, ServerOptimizer
from offbeat.server.journal import Effect, EffectKind
from offbeat.server.messages import Push
from offbeat.server.sharding import ShardState


class Follower:
    """Copy of one shard's weights, clocks and optimizer."""

    def __init__(self, state: ShardState, make_apply: MakeApply) -> None:
        self._state = state
        self._apply = make_apply(state.weights)
        self._gathered = RunningMean()
        self._factor = 1.0
        if isinstance(self._apply, ServerOptimizer):
            for part, tensors in enumerate(state.optimizer, start=1):
                self._apply.load_state(part, tensors)

    def follow(self, effect: Effect) -> None:
        """Change the copy as the shard has changed."""
        match effect.kind:
            case EffectKind.APPLY:
                self._apply(self._state.weights, _push(effect))
            case EffectKind.GATHER:
                self._gathered.add(_push(effect), effect.weight)
                self._factor = effect.factor
            case EffectKind.FOLD:
                self._gathered.add_to(self._state.weights, effect.factor)
        self._state.applied.update(effect.clocks)

    def settle(self) -> ShardState:
        """Return the state with all acknowledged pushes in the weights: a round in progress has ended."""
        self._gathered.add_to(self._state.weights, self._factor)
        if isinstance(self._apply, ServerOptimizer):
            for part, tensors in enumerate(self._state.optimizer, start=1):
                self._apply.copy_state(part, tensors)
        return self._state


def _push(effect: Effect) -> Push:
    worker = next(iter(effect.clocks), -1)
    return Push(worker=worker, clock=0, update=effect.update, report=effect.report)
