"""PerGroup: a shard with weights for each group of workers; groups propagate pushes to each other.

    a push of a worker of group G    apply it to G's weights;  S_G += what that changed
    after every |G| pushes of G      every other group's weights += S_G;  S_G ← 0
    at a regrouping                  all propagate everything, and all groups continue from the same weights

All groups of a shard live in one process: propagation is an addition, and no group waits for it. Every
group's weights are the initial weights, all pushes of the group, and those of other groups that have been
propagated to it. An evaluation, a checkpoint or a snapshot therefore reads one group's weights plus all that
is still pending in the others: up to rounding, all pushes so far, whichever group is read. With one group
this is `Immediate`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.server.aggregation import Immediate
from offbeat.server.apply import ApplyUpdate, MakeApply, ServerOptimizer, add_update
from offbeat.server.messages import Answer, Push, Tensors
from offbeat.server.sharding import ShardState
from offbeat.strategies.gssp.rule import GroupClocks, GroupRule


@dataclass
class Group:
    """Weights of one group on one shard."""

    weights: Tensors
    apply: ApplyUpdate
    pending: Tensors  # S: the sum of pushes not yet propagated to the other groups
    pushes: int = 0  # number of pushes in `pending`


class PerGroup(Immediate[GroupClocks]):
    """Aggregation that applies a push to its group at once, and to other groups when the group has pushed."""

    rule: GroupRule

    def __init__(self, shard: ShardState, rule: GroupRule, make_apply: MakeApply) -> None:
        super().__init__(shard, rule, make_apply)
        self._make_apply = make_apply
        self._groups = [Group(shard.weights, self.apply, [torch.zeros_like(w) for w in shard.weights])]
        self._regroupings = 0
        self._all: Tensors = []  # memory for the weights of an evaluation
        self._rebuild_groups(rule.init())

    @property
    def can_be_followed(self) -> bool:
        return self.apply is add_update  # else each group has an optimizer's state of its own

    def weights_for(self, state: GroupClocks, worker: int | None) -> Tensors:
        return self._all_pushed() if worker is None else self._groups[state.group[worker]].weights

    def apply_push(self, state: GroupClocks, push: Push) -> None:
        number = state.group[push.worker]
        group = self._groups[number]
        if len(self._groups) == 1:  # there is no other to propagate to
            group.apply(group.weights, push)
            return
        if group.apply is add_update:
            torch._foreach_add_(group.pending, push.update)
            group.apply(group.weights, push)
        else:  # an optimizer: the change is propagated, and each group has its own momentum
            torch._foreach_sub_(group.pending, group.weights)
            group.apply(group.weights, push)
            torch._foreach_add_(group.pending, group.weights)
        group.pushes += 1
        if group.pushes >= state.size(number):
            self._propagate(group)

    def after(self, state: GroupClocks) -> list[Answer]:
        if self._regroupings != state.regroupings:
            self._rebuild_groups(state)
        for number, group in enumerate(self._groups):
            if group.pushes and not state.size(number):  # no member is left to complete the count
                self._propagate(group)
        return []

    def restart(self, state: GroupClocks) -> None:
        for group in self._groups:
            torch._foreach_zero_(group.pending)
            group.pushes = 0
        super().restart(state)
        self._rebuild_groups(state)

    def clear_optimizer(self) -> None:
        for group in self._groups:
            if isinstance(group.apply, ServerOptimizer):
                group.apply.clear_state()

    def _all_pushed(self) -> Tensors:
        """Return weights with all pushes in them: a copy, unless nothing is pending in the other groups."""
        first, *others = self._groups
        if not any(group.pushes for group in others):
            return first.weights
        self._all = self._all or [torch.empty_like(weight) for weight in first.weights]
        torch._foreach_copy_(self._all, first.weights)
        for group in others:
            torch._foreach_add_(self._all, group.pending)
        return self._all

    def _propagate(self, group: Group) -> None:
        """Add the group's pending pushes to the weights of all other groups."""
        if group.pushes:
            for other in self._groups:
                if other is not group:
                    torch._foreach_add_(other.weights, group.pending)
            torch._foreach_zero_(group.pending)
            group.pushes = 0

    def _rebuild_groups(self, state: GroupClocks) -> None:
        """Make as many groups as the rule has: all propagate everything, and get the same weights."""
        for group in self._groups:
            self._propagate(group)
        first, count = self._groups[0], self.rule.count(state)
        del self._groups[count:]
        for group in self._groups[1:]:
            torch._foreach_copy_(group.weights, first.weights)
        while len(self._groups) < count:
            weights = [weight.clone() for weight in first.weights]
            pending = [torch.zeros_like(weight) for weight in weights]
            self._groups.append(Group(weights, self._make_apply(weights), pending))
        self._regroupings = state.regroupings
