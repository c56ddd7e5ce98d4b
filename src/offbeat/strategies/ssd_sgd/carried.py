"""The rule that carries the optimizer's state: local steps are the user's own, from the pulled state.

    a pull has arrived, which lacks the step t−1:
        w_loc, m_loc ← the optimizer's step from (w_glob, m_glob) with the local gradient of t−1, at its rate
        of its own slice a worker has the step t−1 itself:  w_loc, m_loc ← w_glob, m_glob
    w_loc, m_loc ← the optimizer's step with g_i

m stands for the whole state: momentum, Adam's moments, step counters. A counter is one number per parameter.
Where this worker had a gradient in every step, its own counters are right, and what arrives of them is not
read, which would stall a GPU; after a step without a gradient here, they are read with the next pull.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.optimizer import LearningRates, OptimizerState
from offbeat.core.partition import EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.parcels import Parcels, ParcelState, Piece
from offbeat.strategies.ssd_sgd.sharded_optimizer import ParamShard
from offbeat.strategies.ssd_sgd.state_form import State, as_laid_out, set_number


@dataclass
class CarriedState:
    """A worker's state under this rule. Parameters are known by their numbers."""

    parcels: ParcelState = field(default_factory=ParcelState)
    numbers: dict[int, list[Any]] = field(default_factory=dict)  # counters, when the pull was started
    behind: list[int] = field(default_factory=list)  # parameters whose counters here may be wrong


class Carried:
    """The local steps of a worker."""

    def __init__(self, state: CarriedState, replica: Replica, parcels: Parcels, trusts_numbers: bool) -> None:
        self.parcels = parcels
        self._state = state
        self._replica = replica
        self._trusts_numbers = trusts_numbers
        self._groups = {p: i for i, group in enumerate(replica.optimizer.groups) for p in group["params"]}
        self._optimizers = {
            p: o for o in replica.optimizer.optimizers for g in o.param_groups for p in g["params"]
        }

    def keep(self, part: EvenSlice) -> None:
        """Keep what is needed to make this step again when the pull of a part has arrived."""
        self.parcels.keep(part)
        self._state.numbers = {}
        for piece in self.parcels.arrived(part):
            number = self.parcels.numbers[piece.shard.param]
            state = self._replica.optimizer.state_of(piece.shard.param)
            if piece.form.numbers and state and number not in self._state.numbers:
                values = [state[name] for name in piece.form.numbers]
                self._state.numbers[number] = [v.clone() if isinstance(v, Tensor) else v for v in values]

    def note_missing(self, missing: list[nn.Parameter]) -> None:
        """Take note of the parameters that had no gradient here."""
        numbers = {self.parcels.numbers[param] for param in missing}
        self._state.behind = sorted({*self._state.behind, *numbers})

    def adopt(
        self, part: EvenSlice, rates: LearningRates, missing: list[nn.Parameter], redo: bool = True
    ) -> None:
        """Replace local weights and state by what a pull has brought, with the latest step made on it."""
        pieces = self.parcels.arrived(part)
        absent = set(missing)
        brought: list[State] = [self._brought_state(piece) for piece in pieces]
        steps: OptimizerState = {}
        members: list[list[Tensor]] = [[] for _ in self._replica.optimizer.groups]
        for piece, state in zip(pieces, brought, strict=True):
            if redo and piece.shard.param not in absent and piece.shard.param in self._groups:
                piece.weight.grad = piece.grad
                steps[piece.weight] = state
                members[self._groups[piece.shard.param]].append(piece.weight)
        if steps:
            self._replica.optimizer.step_tensors(members, rates, steps)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for piece, state in zip(pieces, brought, strict=True):
            piece.weight.grad = None
            self._take(piece.shard, piece.weight, state, piece.shard.start, targets, sources)
        for shard, weight, state, start in self.parcels.own(part):
            self._take(shard, weight, state, start, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        touched = {self.parcels.numbers[piece.shard.param] for piece in pieces}
        touched |= {self.parcels.numbers[shard.param] for shard, *_ in self.parcels.own(part)}
        still = {self.parcels.numbers[param] for param in missing}
        self._state.behind = [n for n in self._state.behind if n not in touched or n in still]

    def _reads_numbers(self, param: nn.Parameter) -> bool:
        return not self._trusts_numbers or self.parcels.numbers[param] in self._state.behind

    def _brought_state(self, piece: Piece) -> State:
        """Return the state that has arrived, before the latest step; empty if there is none yet."""
        param, form = piece.shard.param, piece.form
        kept = self._state.numbers.get(self.parcels.numbers[param], [])
        if not piece.marks:
            return {}
        values: list[Any] = kept
        if self._reads_numbers(param) or len(kept) != len(form.numbers):
            if not any(bool(mark.any()) for mark in piece.marks):
                return {}
            values = [float(value) for value in piece.numbers]
        state: State = {}
        for name, tensor in piece.state.items():
            device = form.tensors[name].device
            state[name] = tensor if tensor.device == device else tensor.to(device)
        for (name, example), value in zip(form.numbers.items(), values, strict=True):
            set_number(state, name, example, value)
        return state

    def _take(
        self,
        shard: ParamShard,
        weight: Tensor,
        state: State,
        start: int,
        targets: list[Tensor],
        sources: list[Tensor],
    ) -> None:
        """Plan the copies of a piece to the local weights and state; set its numbers.

        `weight` and the tensors of `state` have the parameter's elements from `start` on.
        """
        param = shard.param
        targets.append(shard.cut(param.data))
        sources.append(shard.cut(weight, start))
        if not state or param not in self._optimizers:
            return
        form = self.parcels.forms[param]
        local: State = self._optimizers[param].state[param]
        reads_numbers = self._reads_numbers(param) or not local
        for name, each in form.tensors.items():
            if name not in local:
                local[name] = each.zeros()
            target, source = as_laid_out(local, name, param), as_laid_out(state, name, weight)
            targets.append(shard.cut(target) if each.cut else target)
            sources.append(shard.cut(source, start) if each.cut else source)
        if reads_numbers:
            for name, example in form.numbers.items():
                set_number(local, name, example, state[name])
