"""Messages between workers and a parameter server: plain data, whatever transport carries them.

A clock counts the pushes of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from offbeat.core.port import Op

Tensors = list[Tensor]
M = TypeVar("M")


def changed(message: M, **changes: object) -> M:
    """Return a message with some of its fields changed; many times as fast as `dataclasses.replace`."""
    copy = object.__new__(type(message))
    fields = copy.__dict__
    fields.update(message.__dict__)
    fields.update(changes)
    return copy


def stamp(message: object, **changes: object) -> None:
    """Change fields of a message that nobody else has yet, in place: a transport does, as it arrives."""
    message.__dict__.update(changes)


@dataclass(frozen=True, kw_only=True)
class Join:
    """Announcement that a worker joins or rejoins."""

    worker: int
    clock: int | None = None  # of the worker's latest acknowledged push; None: the worker is new
    pushes: int | None = None  # acknowledged since it first joined; None: all from clock 1 on
    fenced: bool = False  # others trained on without this worker: it returns at the slowest member's clock


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Notice that a worker has left: it said so, died, or was silent for too long."""

    worker: int
    at_s: float = 0.0  # when, on the server's clock


@dataclass(frozen=True, kw_only=True)
class Push:
    """An update, or a gradient, for the weights. Times are data, measured by the transport."""

    worker: int
    clock: int
    update: Tensors
    report: tuple[float, ...] = ()  # learning rates by parameter group, or numbers for the aggregation
    codec: int = 0  # number of the push codec; if not 0, `update` holds packets
    finite: bool | None = None  # whether the update is finite, if the transport has checked that
    at_s: float = 0.0  # when it arrived, on the server's clock
    spent_s: float = 0.0  # seconds that the worker computed for this push


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A worker's request for the weights, to use them at `clock`; None: for the weights as they are now."""

    worker: int
    clock: int | None
    into: Tensors = field(default_factory=list, compare=False, repr=False)  # where the reply is written


@dataclass(frozen=True, kw_only=True)
class Reduce:
    """A worker's tensor for reduction number `number` of all workers. The tensor is used in place."""

    worker: int
    number: int
    op: Op
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint's request for one part of the server optimizer's state; parts count from 1."""

    worker: int
    part: int
    into: Tensors = field(default_factory=list, compare=False, repr=False)  # where the reply is written


@dataclass(frozen=True, kw_only=True)
class Load:
    """The weights to start with (part 0), or one part of the server optimizer's state."""

    worker: int
    part: int
    tensors: Tensors
    initial: bool = False  # ignored by a server that has weights


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Wake-up at the time that an aggregation asked for."""

    at_s: float


@dataclass(frozen=True, kw_only=True)
class JoinAck:
    """The answer to a join."""

    worker: int
    clock: int  # the worker's clock from now on
    lost: int = 0  # acknowledged pushes that this server does not hold any more


@dataclass(frozen=True, kw_only=True)
class PushAck:
    """The answer to a push, which has been accepted or refused."""

    worker: int
    clock: int
    refused: str = ""  # the reason; empty: accepted


@dataclass(frozen=True, kw_only=True)
class PullReply:
    """The answer to a pull: the weights as the server holds them at this moment."""

    worker: int
    staleness: int = 0  # by how many clocks the slowest worker's updates lag behind the reader
    hint: int = 0  # the rule's number for this worker
    pushes: int = field(default=0, compare=False)  # that the shard has received, of all workers
    for_evaluation: bool = field(default=False, compare=False)  # the worker will not train on the weights
    weights: Tensors = field(default_factory=list, compare=False, repr=False)  # not a copy


@dataclass(frozen=True, kw_only=True)
class ReduceReply:
    """The answer to a Reduce, once all participants have sent their tensors. Copy the tensor at once."""

    worker: int
    number: int
    tensor: Tensor  # lies in the memory of one of the messages


@dataclass(frozen=True, kw_only=True)
class SaveReply:
    """The answer to a Save."""

    worker: int
    part: int
    tensors: Tensors = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class LoadAck:
    """The answer to a Load."""

    worker: int


ClientMessage = Push | Pull | Reduce | Save | Load
Message = Join | Leave | Tick | ClientMessage
Answer = JoinAck | PushAck | PullReply | ReduceReply | SaveReply | LoadAck
