"""Ways to apply a push to a server's weights: add it, or step the server's optimizer with it.

With `push="gradient"`, or where SSD-SGD runs `on="server"`, workers push gradients instead of updates. The
server then steps its slice of the weights with an optimizer of the user's class and settings. Each push
reports the learning rates of all parameter groups and, for every parameter, a mark: 1 if the push has a
gradient for it, else 0; a parameter without a gradient is left alone. A shard's slice cuts through
parameters, so only optimizers that step each element by itself can be used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from offbeat.server.messages import Push, Tensors
from offbeat.server.optimizer_spec import OptimizerSpec

ApplyUpdate = Callable[[Tensors, Push], None]
MakeApply = Callable[[Tensors], ApplyUpdate]  # for these weights


def add_update(weights: Tensors, push: Push) -> None:
    """Add an update that the worker's own optimizer made."""
    if len(weights) == 1:  # half the time, for small ones
        weights[0].add_(push.update[0])
    else:
        torch._foreach_add_(weights, push.update)


def make_apply(spec: OptimizerSpec | None) -> MakeApply:
    """Return a factory of functions that apply pushes: by an optimizer or, without a spec, by addition."""

    def make(weights: Tensors) -> ApplyUpdate:
        return add_update if spec is None else ServerOptimizer(spec, weights)

    return make


class ServerOptimizer:
    """Optimizer of the user's class that applies pushed gradients on one shard."""

    def __init__(self, spec: OptimizerSpec, weights: Tensors) -> None:
        self._pieces = [
            (nn.Parameter(weights[flat][start:stop]), flat, start, stop, mark)
            for _, flat, start, stop, mark in spec.pieces
        ]
        members: list[list[Tensor]] = [[] for _ in spec.groups]
        for (group, *_), (param, *_) in zip(spec.pieces, self._pieces, strict=True):
            members[group].append(param)
        self._optimizers = spec.build(members)
        by_kind = {kind: [g for g, k in enumerate(spec.kinds) if k == kind] for kind in spec.kinds}
        self._group_numbers = [number for numbers in by_kind.values() for number in numbers]
        # Of each parameter, where its state lies: in the optimizer of its class.
        places = {p: o.state for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self._state = [places[param] for param, *_ in self._pieces]
        self._weights = weights
        self._state_names = list(spec.state_names().items())

    def __call__(self, weights: Tensors, push: Push) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        rates, marks = push.report[: len(groups)], push.report[len(groups) :]
        for param, flat, start, stop, mark in self._pieces:
            param.grad = push.update[flat][start:stop] if marks[mark] else None
        for group, number in zip(groups, self._group_numbers, strict=True):
            group["lr"] = rates[number]
        for optimizer in self._optimizers:
            optimizer.step()

    # --- for checkpoints: the state, part by part, each laid out as the weights are; parts count from 1

    def save_state(self, part: int) -> Tensors:
        """Return a copy of one part of the state."""
        flats = [torch.zeros_like(weight) for weight in self._weights]
        self.copy_state(part, flats)
        return flats

    def copy_state(self, part: int, flats: Tensors) -> None:
        """Copy one part of the state into memory that is laid out as the weights are."""
        name, _ = self._state_names[part - 1]
        for (param, flat, start, stop, _), state in zip(self._pieces, self._state, strict=True):
            value = state[param].get(name)
            if value is None:  # the parameter has not been stepped yet
                flats[flat][start:stop].zero_()
            else:
                flats[flat][start:stop] = value

    def load_state(self, part: int, flats: Tensors) -> None:
        """Replace one part of the state. All parts must follow, in order."""
        name, elementwise = self._state_names[part - 1]
        for (param, flat, start, stop, _), state in zip(self._pieces, self._state, strict=True):
            value = flats[flat][start:stop].clone()
            state[param][name] = value if elementwise else value[0].float()
        if part == len(self._state_names):
            for (param, *_), state in zip(self._pieces, self._state, strict=True):
                if not any(value.any() for value in state[param].values()):
                    state[param].clear()  # the parameter has not been stepped yet

    def clear_state(self) -> None:
        """Clear the state, as before the first step."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
