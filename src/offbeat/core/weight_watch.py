"""Weights that the loop changes by itself, where a strategy would lose the change.

A loop may do to its weights what no optimizer does: bound them (WGAN), go back to the best checkpoint, load
others after attach, interpolate them (Lookahead). Mostly that counts as a part of the next step. But some
strategies keep the weights elsewhere, at a server, at their owners or beside a prediction, and would go on
from there as if nothing had happened: a strategy's `Layout` tells.

Hooks of others that an optimizer calls after its step belong to the loop. They run before ours, so the
weights are noted in front of them, too.

Changes in place are counted by torch, except those through `.data`. So the bits of all weights are added up
as well, but not at each step: in the first ones, and then at each one that `is_looked_at`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.core.blocks import Layout
from offbeat.core.checksum import bits
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError

FIRST, EVERY = 64, 101
SAMPLES = 64
OURS = 2  # hooks after an optimizer's step: to note the weights, and the last one


def is_looked_at(step: int) -> bool:
    """Return whether a step is one of those in which something costly is checked."""
    return step < FIRST or step % EVERY == 0


class WeightWatch:
    """The weights as the strategy last left them, to be compared with what the loop hands back."""

    def __init__(self, replica: Replica, strategy: str, layout: Layout) -> None:
        self._replica = replica
        self._strategy = strategy
        self._layout = layout
        self._params = [param for block in replica.blocks for param in block.params]
        self._step = 0
        self._versions: list[int] = []
        self._samples: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._places = [_places(flat) for flat in replica.weights]

    @classmethod
    def of(cls, replica: Replica, strategy: Strategy[Any]) -> WeightWatch:
        """Watch a replica's weights for a strategy."""
        return cls(replica, strategy.name, strategy.layout(replica.model))

    def note_steps(self, optimizer: Optimizer) -> RemovableHandle:
        """Note the weights after each step of an optimizer, in front of the hooks of others."""

        def note(optimizer: Optimizer, *_: Any) -> None:
            if _has_other_hooks(optimizer) and not self._layout.keeps_edits:
                self._note_weights()

        handle = optimizer.register_step_post_hook(note)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        return handle

    def check_hooks(self, optimizer: Optimizer) -> None:
        """Raise an error if another hook has changed the weights since the optimizer's step."""
        if _has_other_hooks(optimizer) and not self._layout.keeps_edits:
            self.check()

    def note(self, step: int) -> None:
        """Note the weights: the strategy has acted, and the loop goes on."""
        if self._layout.keeps_edits if step else self._layout.keeps_loaded:
            self._versions = []
            return
        self._step = step
        self._note_weights()

    def _note_weights(self) -> None:
        weights = self._replica.weights
        self._versions = [param._version for param in self._params]
        with torch.no_grad():
            self._samples = [flat[places] for flat, places in zip(weights, self._places, strict=True)]
            self._sums = [bits(flat) for flat in weights] if is_looked_at(self._step) else []

    def check(self) -> None:
        """Raise an error if the loop has changed the weights since."""
        if not self._versions:
            return
        self._replica.keep_layout()
        weights = self._replica.weights
        with torch.no_grad():
            if self._sums:
                changed = any(bits(f) != total for f, total in zip(weights, self._sums, strict=True))
            elif self._versions != [param._version for param in self._params]:  # it may have put them back
                now = (flat[places] for flat, places in zip(weights, self._places, strict=True))
                changed = not all(map(torch.equal, now, self._samples))
            else:
                changed = False
        if changed:
            raise OffbeatError(
                f"the loop has changed weights by itself, outside of its optimizers (load_state_dict(), "
                f"clamp_(), an assignment, or an optimizer around the attached one), but {self._strategy} "
                "keeps the weights elsewhere and would undo it. To load weights, do so before attach, or "
                "close() and attach again; to change them at each step, use BSP, LocalSGD, SelSync or DiLoCo"
            )


def _has_other_hooks(optimizer: Optimizer) -> bool:
    return len(optimizer._optimizer_step_post_hooks) > OURS


def _places(flat: Tensor) -> Tensor:
    """Return places spread over a flat tensor."""
    count = min(SAMPLES, flat.numel())
    return torch.arange(count, device=flat.device) * flat.numel() // max(1, count)
