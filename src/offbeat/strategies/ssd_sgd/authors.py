"""The authors' rule [code]: local steps without momentum, guided by the global gradient that was last seen.

    a pull has arrived:  g_sync = (prev − w_glob)/(k·η);  prev ← w_glob;  w_loc ← w_glob
    w_loc ← w_loc − η (α g_i + wd·w_loc + β g_sync)

A pull that follows push(c) is used in step c+1, so gradient c+2 is the first that sees it, as in the authors'
code. A server answers it in the background. On collectives the owners must first step with push(c), which
they do in step c+1: there the workers wait for the pull.

α = (1 − β)/(1 − μ), unless it is given: then a local step is as long as one of w_glob, in the steady state.
Where the learning rate changes, k·η is the sum of the rates of the steps since the last pull of the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.optimizer import LearningRates
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.pull_schedule import ScheduledPull
from offbeat.strategies.ssd_sgd.weight_store import WeightStore

MAX_PIECE = 1 << 20  # entries that are moved at a time, from g_sync to prev


@dataclass
class AuthorsState:
    """A worker's state under this rule. Lists of tensors have one per dtype and device."""

    prev: list[Tensor] = field(default_factory=list)  # w_glob as of the latest pull that has arrived
    g_sync: list[Tensor] = field(default_factory=list)  # a part whose pull is in flight: w_glob
    lr_sums: list[LearningRates] = field(default_factory=list)  # by part, since its latest pull


class Authors:
    """The local steps of a worker. `alpha` and `scaling` may be None, as in the settings."""

    def __init__(
        self,
        state: AuthorsState,
        replica: Replica,
        store: WeightStore,
        parts: int,
        alpha: float | None,
        beta: float,
        scaling: float | None,
    ) -> None:
        self._state = state
        self._replica = replica
        self._alpha, self._beta, self._scaling = alpha, beta, scaling
        if not state.g_sync:
            state.prev, state.g_sync = store.zeros(), store.zeros()
            state.lr_sums = [[0.0] * len(replica.optimizer.groups) for _ in range(parts)]
        sizes = [max(1, min(MAX_PIECE, flat.numel() // 32)) for flat in state.g_sync]
        self._spare = [flat.new_empty(size) for flat, size in zip(state.g_sync, sizes, strict=True)]
        syncs: dict[nn.Parameter, Tensor] = {}
        for flat, blocks in zip(state.g_sync, replica.flat_groups().values(), strict=True):
            for block in blocks:
                views = block.views(flat[int(block.weight.storage_offset()) :])
                syncs.update(zip(block.params, views, strict=True))
        groups = replica.optimizer.groups
        self._members = [[(p, syncs[p]) for p in group["params"] if p in syncs] for group in groups]

    def start(self) -> None:
        """Begin, while w_glob and w_loc are equal for the last time."""
        for prev, weight in zip(self._state.prev, self._replica.weights, strict=True):
            prev[: weight.numel()].copy_(weight)

    def count(self, rates: LearningRates) -> None:
        """Count the learning rates of a push that has been applied."""
        self._state.lr_sums = [
            [total + rate for total, rate in zip(sums, rates, strict=True)] for sums in self._state.lr_sums
        ]

    def adopt(self, pull: ScheduledPull) -> None:
        """Use a pull, which has arrived in the memory of g_sync."""
        state = self._state
        pieces_by_group = pull.slices.pieces([spare.numel() for spare in self._spare])
        lr_sums = state.lr_sums[pull.part.number]
        for pieces, lr_sum in zip(pieces_by_group, lr_sums, strict=True):
            divisor = self._scaling or lr_sum
            for kind, start, stop in pieces:
                arrived, prev = state.g_sync[kind][start:stop], state.prev[kind][start:stop]
                change = torch.sub(prev, arrived, out=self._spare[kind][: stop - start])
                prev.copy_(arrived)
                torch.mul(change, 1 / divisor if divisor else 0.0, out=arrived)
        state.lr_sums[pull.part.number] = [0.0] * len(lr_sums)
        for w_loc, w_glob in zip(*map(pull.slices.of, (self._replica.weights, state.prev)), strict=True):
            if w_loc:
                torch._foreach_copy_(w_loc, w_glob)

    def step(self, rates: LearningRates) -> None:
        """Step w_loc, where there is a gradient."""
        for group, members, rate in zip(self._replica.optimizer.groups, self._members, rates, strict=True):
            stepped = [(param, param.grad, sync) for param, sync in members if param.grad is not None]
            if not stepped:
                continue
            params, grads, syncs = (list(column) for column in zip(*stepped, strict=True))
            if decay := group.get("weight_decay", 0):
                torch._foreach_mul_(params, 1 - rate * decay)
            signed_rate = rate if group.get("maximize") else -rate
            torch._foreach_add_(params, grads, alpha=signed_rate * self._alpha_of(group))
            if self._beta:
                torch._foreach_add_(params, syncs, alpha=-rate * self._beta)

    def _alpha_of(self, group: Mapping[str, Any]) -> float:
        if self._alpha is not None:
            return self._alpha
        momentum = float(group.get("momentum", 0.0))
        return max(0.0, 1 - self._beta) / (1 - momentum) if momentum < 1 else 1.0
