"""GroupedServer: a shard with weights for each group of workers; groups tell each other what was pushed.

    a push of a worker of group G    fold it into G's weights;  S_G += what that changed
    after every |G| pushes of G      every other group's weights += S_G;  S_G ← 0
    at a regrouping                  all are told everything, and all groups go on from the same weights

All groups of a shard live in one process: telling is an addition, and nobody waits for it. Every group's
weights are the weights to start with, all pushes of the group, and those of the others that it was told of.
What an evaluation, a checkpoint or a snapshot sees is therefore one group's weights with all that it was not
told of yet: everything that was ever pushed, whichever group is asked, to rounding. With one group this is a
plain ParameterServer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.server.apply import ApplyUpdate, MakeApply, add_update
from offbeat.server.messages import Answer, Pull, Push, Tensors
from offbeat.server.server import ParameterServer, ShardState
from offbeat.strategies.gssp.rule import GroupClocks, GroupRule


@dataclass
class Group:
    weights: Tensors
    fold: ApplyUpdate
    untold: Tensors  # S: what the other groups have not been told of yet
    pushes: int = 0  # in it


class GroupedServer(ParameterServer[GroupClocks]):
    rule: GroupRule

    def __init__(self, memory: ShardState, rule: GroupRule, folding: MakeApply) -> None:
        super().__init__(memory, rule, folding(memory.weights))
        self._folding = folding
        self._groups = [Group(memory.weights, self.fold, [torch.zeros_like(w) for w in memory.weights])]
        self._regroupings = 0
        self._all_told: Tensors = []  # room for what an evaluation sees
        self._arrange()

    @property
    def weights(self) -> Tensors:
        """Everything that was pushed, in a copy if not all groups have been told of all."""
        first, *others = self._groups
        if not any(group.pushes for group in others):
            return first.weights
        self._all_told = self._all_told or [torch.empty_like(weight) for weight in first.weights]
        torch._foreach_copy_(self._all_told, first.weights)
        for group in others:
            torch._foreach_add_(self._all_told, group.untold)
        return self._all_told

    def weights_of(self, worker: int) -> Tensors:
        """Those of its group."""
        return self._group(worker).weights

    def restart(self, weights: Tensors | None = None) -> None:
        for group in self._groups:
            torch._foreach_zero_(group.untold)
            group.pushes = 0
        super().restart(weights)
        self._arrange()

    def _group(self, worker: int) -> Group:
        return self._groups[self.state.group[worker]]

    def _fold(self, push: Push) -> None:
        group = self._group(push.worker)
        if len(self._groups) == 1:  # there is nobody to tell
            group.fold(group.weights, push)
            return
        if group.fold is add_update:
            torch._foreach_add_(group.untold, push.update)
            group.fold(group.weights, push)
        else:  # an optimizer: the others are told of the change, and keep their momentum to themselves
            torch._foreach_sub_(group.untold, group.weights)
            group.fold(group.weights, push)
            torch._foreach_add_(group.untold, group.weights)
        group.pushes += 1
        if group.pushes >= len(self.state.members(self.state.group[push.worker])):
            self._tell(group)

    def _tell(self, group: Group) -> None:
        """The other groups, without asking them."""
        if group.pushes:
            for other in self._groups:
                if other is not group:
                    torch._foreach_add_(other.weights, group.untold)
            torch._foreach_zero_(group.untold)
            group.pushes = 0

    def _admit(self) -> list[Answer]:
        if self._regroupings != self.state.regroupings:
            self._arrange()
        for number, group in enumerate(self._groups):
            if group.pushes and not self.state.members(number):  # nobody is left to complete it
                self._tell(group)
        return super()._admit()

    def _arrange(self) -> None:
        """As many groups as the rule has: all are told everything, and go on from the same weights."""
        for group in self._groups:
            self._tell(group)
        first, count = self._groups[0], self.rule.count(self.state)
        del self._groups[count:]
        for group in self._groups[1:]:
            torch._foreach_copy_(group.weights, first.weights)
        while len(self._groups) < count:
            weights = [weight.clone() for weight in first.weights]
            untold = [torch.zeros_like(weight) for weight in weights]
            self._groups.append(Group(weights, self._folding(weights), untold))
        self._regroupings = self.state.regroupings

    def _shown(self, pull: Pull) -> Tensors:
        return self.weights if pull.clock is None else self.weights_of(pull.worker)
