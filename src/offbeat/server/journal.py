"""Journal of a shard: what each message has changed in its weights, so that a copy elsewhere can follow.

Effects are recorded instead of messages: a follower needs neither the rule nor the clock of the shard.

    CLOCKS   applied[w] ← c                                      of workers that joined, or were refused
    APPLY    w ← apply(w, update), and the clocks                one push, or a barrier's mean of several
    GATHER   mean of the round ← update by its weight            acknowledged, but not in the weights yet
    FOLD     w ← w + factor · mean                               the round has ended
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from offbeat.server.messages import Tensors


class EffectKind(IntEnum):
    """Kinds of effects."""

    CLOCKS = 0
    APPLY = 1
    GATHER = 2
    FOLD = 3

    @property
    def has_update(self) -> bool:
        return self in (EffectKind.APPLY, EffectKind.GATHER)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A change of a shard's state. Its tensors must not change until it has been sent."""

    kind: EffectKind
    clocks: Mapping[int, int] = field(default_factory=dict)  # of the workers whose pushes it contains
    update: Tensors = field(default_factory=list)
    report: tuple[float, ...] = ()  # as in the push
    weight: float = 0.0  # of a gathered update in its round's mean
    factor: float = 1.0  # with which the round's mean is applied, or would be now


Journal = Callable[[Effect], None]


def no_journal(effect: Effect) -> None:
    """Record nothing: no other process has a copy."""
