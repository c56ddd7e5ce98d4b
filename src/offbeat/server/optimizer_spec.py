"""OptimizerSpec: the user's optimizer as plain data, from which each shard builds its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.optimizer_state import ELEMENTWISE
from offbeat.errors import SettingError

if TYPE_CHECKING:
    from offbeat.core.replica import Replica
    from offbeat.server.half import ServerHalf


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Optimizers as plain data: of each group its class name, its settings, and its weights."""

    kinds: list[str]  # by group; groups of one class make one optimizer
    groups: list[dict[str, Any]]
    pieces: list[tuple[int, int, int, int, int]]  # group, flat tensor, start, stop; and the index of its mark
    marks: int

    def for_shard(self, bounds: list[tuple[int, int]]) -> OptimizerSpec:
        """Return the spec for one shard, which owns these bounds of the flat tensors."""
        pieces = []
        for group, flat, start, stop, mark in self.pieces:
            low, high = bounds[flat]
            start, stop = max(start, low), min(stop, high)
            if start < stop:
                pieces.append((group, flat, start - low, stop - low, mark))
        return OptimizerSpec(kinds=self.kinds, groups=self.groups, pieces=pieces, marks=self.marks)

    def build(self, params: list[list[Tensor]]) -> list[Optimizer]:
        """Build the optimizers, one for each class, with these parameters of each group."""
        groups = [{**settings, "params": own} for settings, own in zip(self.groups, params, strict=True)]
        kinds = dict.fromkeys(self.kinds)
        return [
            ELEMENTWISE[kind]([g for g, k in zip(groups, self.kinds, strict=True) if k == kind])
            for kind in kinds
        ]

    def state_names(self) -> dict[str, bool]:
        """Return the names of the optimizers' state, and whether each has a value per element.

        A trial step determines both.
        """
        params = [nn.Parameter(torch.zeros(2)) for _ in self.groups]
        sizes: dict[str, int] = {}
        for param in params:
            param.grad = torch.zeros(2)
        for optimizer in self.build([[param] for param in params]):
            optimizer.step()
            items = [item for state in optimizer.state.values() for item in state.items()]
            sizes |= {name: value.numel() for name, value in items if isinstance(value, Tensor)}
        return {name: sizes[name] == 2 for name in sorted(sizes)}


def runs_at_server(optimizer: Optimizer) -> bool:
    """Return whether a server can run an optimizer of this class: it steps each element by itself."""
    return ELEMENTWISE.get(type(optimizer).__name__) is type(optimizer)


def spec_for(half: ServerHalf, replica: Replica) -> OptimizerSpec | None:
    """Describe the optimizer that a server half has: an outer one, the replica's own, or none."""
    if half.outer_sgd is None:
        return spec_of(replica) if half.owns_optimizer else None
    pieces = [(0, flat, 0, weight.numel(), 0) for flat, weight in enumerate(replica.weights)]
    return OptimizerSpec(kinds=["SGD"], groups=[dict(half.outer_sgd)], pieces=pieces, marks=1)


def spec_of(replica: Replica) -> OptimizerSpec:
    """Describe a replica's optimizer; refuse one that a server cannot run."""
    kinds = []
    for optimizer in replica.optimizer.optimizers:
        kind = type(optimizer).__name__
        if not runs_at_server(optimizer):
            raise SettingError(
                f'push="gradient" or on="server" moves the optimizer to the server, which cannot run a '
                f'{kind}: only {", ".join(ELEMENTWISE)}. With push="update" any optimizer works'
            )
        kinds += [kind] * len(optimizer.param_groups)
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
                if group is not None:  # else no group steps the parameter
                    pieces.append((group, flat, end + start, end + stop, mark))
                mark += 1
            end += block.numel
    return OptimizerSpec(kinds=kinds, groups=groups, pieces=pieces, marks=mark)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {key: value for key, value in group.items() if key != "params"}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in settings.items()}
