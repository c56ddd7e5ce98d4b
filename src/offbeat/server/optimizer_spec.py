"""The optimizer at the server: for `push="gradient"`, where workers push gradients instead of updates.

The server then steps its share of the weights at every push, by an optimizer of the user's kind and settings.
With a push come the learning rates of all parameter groups and, for every parameter, a mark: 1 if there is a
gradient for it, else 0; then it is left alone. A share cuts through parameters, so the optimizer must be one
that steps each element by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.optimizer import ELEMENTWISE
from offbeat.core.replica import Replica
from offbeat.errors import SettingError
from offbeat.server.apply import ApplyUpdate, MakeApply, add_update
from offbeat.server.messages import Push, Tensors


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer as plain data: its kind, the settings of its groups, and which weights are in which."""

    kind: str
    groups: list[dict[str, Any]]
    pieces: list[tuple[int, int, int, int, int]]  # group, flat tensor, from, to; and which mark is for it
    marks: int

    @classmethod
    def of(cls, replica: Replica) -> OptimizerSpec:
        optimizer = replica.optimizer.wrapped
        kind = type(optimizer).__name__
        if ELEMENTWISE.get(kind) is not type(optimizer):
            raise SettingError(
                f'push="gradient" or on="server" gives the server the optimizer, and it cannot take over a '
                f'{kind}: only {", ".join(ELEMENTWISE)}. With push="update" any optimizer works'
            )
        groups = [_settings(group) for group in replica.optimizer.groups]
        group_of = {p: g for g, group in enumerate(replica.optimizer.groups) for p in group["params"]}
        pieces: list[tuple[int, int, int, int, int]] = []
        mark = 0
        for flat, blocks in enumerate(replica.flat_groups().values()):
            end = 0
            for block in blocks:
                ends = [*block.offsets[1:], block.numel]
                for param, start, stop in zip(block.params, block.offsets, ends, strict=True):
                    group = group_of.get(param)
                    if group is not None:  # else nobody steps it
                        pieces.append((group, flat, end + start, end + stop, mark))
                    mark += 1
                end += block.numel
        return cls(kind=kind, groups=groups, pieces=pieces, marks=mark)

    def share(self, cuts: list[tuple[int, int]]) -> OptimizerSpec:
        """Of the part from cut to cut of each flat tensor, counted from there."""
        pieces = []
        for group, flat, start, stop, mark in self.pieces:
            low, high = cuts[flat]
            start, stop = max(start, low), min(stop, high)
            if start < stop:
                pieces.append((group, flat, start - low, stop - low, mark))
        return OptimizerSpec(kind=self.kind, groups=self.groups, pieces=pieces, marks=self.marks)

    def parts(self) -> dict[str, bool]:
        """What such an optimizer keeps, and whether for each element or for a parameter: seen by a step."""
        params = [nn.Parameter(torch.zeros(2)) for _ in self.groups]
        groups = [
            {**settings, "params": [param]} for settings, param in zip(self.groups, params, strict=True)
        ]
        optimizer = ELEMENTWISE[self.kind](groups)
        for param in params:
            param.grad = torch.zeros(2)
        optimizer.step()
        kept = [item for state in optimizer.state.values() for item in state.items()]
        sizes = {name: value.numel() for name, value in kept if isinstance(value, Tensor)}
        return {name: sizes[name] == 2 for name in sorted(sizes)}


def make_apply(plan: OptimizerSpec | None) -> MakeApply:
    """How pushes become part of weights: by an optimizer of theirs, or, without a plan, as they are."""

    def fold(weights: Tensors) -> ApplyUpdate:
        return add_update if plan is None else ServerOptimizer(plan, weights)

    return fold


class ServerOptimizer:
    """Folds gradients in."""

    def __init__(self, plan: OptimizerSpec, weights: Tensors) -> None:
        self._pieces = [
            (nn.Parameter(weights[flat][start:stop]), flat, start, stop, mark)
            for _, flat, start, stop, mark in plan.pieces
        ]
        members: list[list[Tensor]] = [[] for _ in plan.groups]
        for (group, *_), (param, *_) in zip(plan.pieces, self._pieces, strict=True):
            members[group].append(param)
        groups = [{**settings, "params": m} for settings, m in zip(plan.groups, members, strict=True)]
        self._optimizer = ELEMENTWISE[plan.kind](groups)
        self._weights = weights
        self._parts = list(plan.parts().items())

    def __call__(self, weights: Tensors, push: Push) -> None:
        groups = self._optimizer.param_groups
        rates, marks = push.report[: len(groups)], push.report[len(groups) :]
        for param, flat, start, stop, mark in self._pieces:
            param.grad = push.update[flat][start:stop] if marks[mark] else None
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self._optimizer.step()

    # --- for checkpoints: what it keeps, part by part, each laid out as the weights are; 0 is for nothing

    def kept(self, part: int) -> Tensors:
        name, _ = self._parts[part - 1]
        flats = [torch.zeros_like(weight) for weight in self._weights]
        for param, flat, start, stop, _ in self._pieces:
            value = self._optimizer.state[param].get(name)
            if value is not None:
                flats[flat][start:stop] = value
        return flats

    def keep(self, part: int, flats: Tensors) -> None:
        """All parts are to come, in order."""
        name, elementwise = self._parts[part - 1]
        for param, flat, start, stop, _ in self._pieces:
            value = flats[flat][start:stop].clone()
            self._optimizer.state[param][name] = value if elementwise else value[0].float()
        if part == len(self._parts):
            for param, *_ in self._pieces:
                if not any(value.any() for value in self._optimizer.state[param].values()):
                    self._optimizer.state[param].clear()  # it has not been stepped yet

    def forget(self) -> None:
        self._optimizer.state.clear()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key != "params"}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()}
