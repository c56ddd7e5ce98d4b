"""Messages: what workers and a parameter server tell each other. Plain data, whatever carries it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Tensors = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Join:
    """A worker comes, or comes back."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A worker has gone: it said so, died, or fell silent."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class Push:
    """A worker's update, to be added. `clock` counts its pushes; times are data, measured by others."""

    worker: int
    clock: int
    update: Tensors
    at_s: float = 0.0  # when it came, on the server's clock
    spent_s: float = 0.0  # what the worker's computation took


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A worker asks for the weights, after its push of the same clock. Clock None: whatever they are now."""

    worker: int
    clock: int | None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to a pull: the weights as the server holds them at this moment."""

    worker: int
    behind: int = 0  # by how many clocks the slowest worker's updates lag behind the reader


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The answer to a push that is not taken."""

    worker: int
    reason: str


Message = Join | Leave | Push | Pull
Answer = Reply | Refusal
