"""Messages: what workers and a parameter server tell each other. Plain data, whatever carries it.

A clock counts the pushes of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from offbeat.core.port import Op

Tensors = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Join:
    """A worker comes, or comes back."""

    worker: int
    clock: int | None = None  # of its latest push that was acknowledged; None: it is new
    pushes: int | None = None  # how many were, since it came first; None: all from clock 1 on


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A worker has gone: it said so, died, or fell silent."""

    worker: int
    at_s: float = 0.0  # when, on the server's clock


@dataclass(frozen=True, kw_only=True)
class Push:
    """What a worker wants folded into the weights. Times are data, measured by others."""

    worker: int
    clock: int
    update: Tensors
    report: tuple[float, ...] = ()  # as data: learning rates by parameter group, or what a rule asks for
    finite: bool | None = None  # whether it is, if that was looked at while it came in
    at_s: float = 0.0  # when it came, on the server's clock
    spent_s: float = 0.0  # what the worker's computation took


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A worker asks for the weights, after its push, to use them at `clock`. None: whatever they are now."""

    worker: int
    clock: int | None
    part: int = 0  # not of the weights, but so manyth of what the server's optimizer keeps


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """What a worker brings to a sum of all workers: its sum number `number`. It is used in place."""

    worker: int
    number: int
    op: Op
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class Tick:
    """The time that a rule asked to be told of has come."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class JoinAck:
    """The answer to a join."""

    worker: int
    clock: int  # where the worker's clock stands
    lost: int = 0  # pushes that were acknowledged, but that this server does not hold any more


@dataclass(frozen=True, kw_only=True)
class PushAck:
    """The answer to a push: it is in the weights. Or it was refused."""

    worker: int
    clock: int
    refused: str = ""  # why


@dataclass(frozen=True, kw_only=True)
class PullReply:
    """The answer to a pull: the weights as the server holds them at this moment."""

    worker: int
    staleness: int = 0  # by how many clocks the slowest worker's updates lag behind the reader
    hint: int = 0  # what the rule tells this worker
    for_evaluation: bool = field(default=False, compare=False)  # it is to be looked at, not to go on with
    weights: Tensors = field(default_factory=list, compare=False, repr=False)  # not a copy


@dataclass(frozen=True, kw_only=True)
class ReduceReply:
    """The answer to a term, once those of all are there. To be copied at once: it lies in a term."""

    worker: int
    number: int
    tensor: Tensor


Message = Join | Leave | Push | Pull | Reduce | Tick
Answer = JoinAck | PushAck | PullReply | ReduceReply
