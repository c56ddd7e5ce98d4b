"""Wire format between a worker and one shard, and between shards: a header of whole numbers, then tensors.

Both ends know the tensors' sizes beforehand: nothing is unpickled, and no number from the wire decides how
much memory is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, unique

import torch
from torch import Tensor

from offbeat.core.port import Op
from offbeat.server.journal import EffectKind
from offbeat.server.messages import Tensors
from offbeat.worlds.processes.server.connection import Connection

NOW = NEW = -1  # as the clock of a pull: the weights as they are; of a join: no clock yet
NOBODY = -1  # as the awaited worker: not all workers have joined
HEADER = 5
# Version of this format and of the cut into shards: those of different versions do not train together.
PROTOCOL = 7


@unique
class MessageType(IntEnum):
    """First number of a header; the comments list the others."""

    JOIN = 1  # worker; clock, or NEW; pushes that were acknowledged
    JOIN_ACK = 2  # clock, pushes lost, whether the shard has weights
    LOAD = 3  # part; whether to keep weights that are there; weights follow, or that part of the optimizer's
    PUSH = 4  # clock, nanoseconds spent computing, codec; an update follows
    PUSH_ACK = 5  # clock, index in REFUSALS, bytes as in PULL_REPLY (0: unknown)
    PULL = 6  # clock, or NOW
    PULL_REPLY = 7  # staleness, bytes that the shard has sent to other hosts, a hint, pushes; weights follow
    LEAVE = 8
    REDUCE = 9  # number of the reduction, elements, index in REDUCTIONS; the elements follow
    REDUCE_REPLY = 10  # number, bytes as in PULL_REPLY; as many elements follow
    SAVE = 11  # part; the shard answers with a PULL_REPLY and that part of the optimizer's state
    REJOIN = 12  # as JOIN, from a worker that another shard has let rejoin at a later clock
    WAITING = 13  # awaited worker, or NOBODY; its silence in ms; workers that have joined. An answer follows
    JOIN_REFUSED = 14  # instead of JOIN_ACK: the shard has trained on without the worker, and cannot go back
    READ = 19  # instead of JOIN: the shard answers with a PULL_REPLY, and the connection ends
    COUNT = 20  # as JOIN, instead of it: the shard answers with a JOIN_ACK, and the connection ends
    LOOK = 21  # instead of JOIN: worker, nanoseconds that it has looked. The shard answers with a JOIN_ACK
    LOOKED = 22  # nanoseconds that the worker owes for others' looks, and those of `busy`. An answer follows
    # Between a shard and its second, which keeps a copy of its state:
    COPY = 15  # identity of the copy, number of clocks; clocks, weights and the optimizer's state follow
    EFFECT = 16  # kind, number of clocks, number of the effect; its numbers, clocks and update follow
    EFFECT_ACK = 17  # number of the effect; 0: of the copy
    RECOVER = 18  # identity of the copy; the second answers with COPY, whose identity is 0 if it has none


MOST = 1 << 53  # greatest number in a header
MOST_WORKERS = 1_000_000_000
MOST_CODECS = 1_000
MOST_PARTS = 8  # parts of an optimizer's state
NOTHING, ANY = (0, 0), (0, MOST)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in Op]
Ranges = Mapping[MessageType, tuple[tuple[int, int], ...]]
FROM_WORKERS: Ranges = {  # the least and the greatest value of each number
    MessageType.JOIN: ((0, MOST_WORKERS), (NEW, MOST), ANY),
    MessageType.REJOIN: ((0, MOST_WORKERS), (0, MOST), ANY),
    MessageType.LOAD: ((0, MOST_PARTS), (0, 1), NOTHING),
    MessageType.PUSH: ((1, MOST), ANY, (0, MOST_CODECS)),
    MessageType.PULL: ((NOW, MOST), NOTHING, NOTHING),
    MessageType.REDUCE: ((1, MOST), ANY, (0, len(REDUCTIONS) - 1)),
    MessageType.SAVE: ((1, MOST_PARTS), NOTHING, NOTHING),
    MessageType.LEAVE: (NOTHING, NOTHING, NOTHING),
    MessageType.READ: (NOTHING, NOTHING, NOTHING),
    MessageType.COUNT: ((0, MOST_WORKERS), ANY, ANY),
    MessageType.LOOK: ((0, MOST_WORKERS), ANY, NOTHING),
}
MOST_CLOCKS = 1 << 16
FROM_SHARDS: Ranges = {
    MessageType.COPY: (ANY, (0, MOST_CLOCKS), NOTHING),
    MessageType.EFFECT: ((0, len(EffectKind) - 1), (0, MOST_CLOCKS), ANY),
    MessageType.RECOVER: (ANY, NOTHING, NOTHING),
}
FROM_SECOND: Ranges = {
    MessageType.COPY: (ANY, (0, MOST_CLOCKS), NOTHING),
    MessageType.EFFECT_ACK: (ANY, NOTHING, NOTHING),
}
QUESTIONS = (MessageType.READ, MessageType.COUNT, MessageType.LOOK)  # of a connection that asks nothing else
FIRST = (  # of a connection
    MessageType.JOIN,
    MessageType.REJOIN,
    *QUESTIONS,
    MessageType.COPY,
    MessageType.RECOVER,
)


class ProtocolError(RuntimeError):
    """A message that is malformed or out of order."""


def encode_header(kind: MessageType, *numbers: int) -> Tensor:
    return torch.tensor([kind, *numbers, *[0] * (HEADER - 1 - len(numbers))], dtype=torch.int64)


def read_header(connection: Connection, known: Ranges = FROM_WORKERS) -> tuple[MessageType, int, int, int]:
    """Receive a header, of a worker or of those `known`; return its type and its numbers."""
    header = torch.zeros(HEADER, dtype=torch.int64)
    connection.receive(header)
    return check_header(header, known)


def check_header(header: Tensor, known: Ranges = FROM_WORKERS) -> tuple[MessageType, int, int, int]:
    """Return a header's type and numbers; raise ProtocolError if they are unknown or out of range."""
    kind, *numbers = header.tolist()
    if kind not in known:
        raise ProtocolError(f"a header of kind {kind}")
    for number, (least, most) in zip(numbers, (*known[kind], NOTHING), strict=True):
        if not least <= number <= most:
            raise ProtocolError(f"{MessageType(kind).name} with the numbers {', '.join(map(str, numbers))}")
    first, second, third, _ = numbers
    return MessageType(kind), first, second, third


def reduce_capacity(slices: Tensors) -> int:
    """Return the most bytes of one REDUCE at a shard of such slices: enough for a gradient with its marks."""
    return 2 * sum(part.nbytes for part in slices) + (1 << 16)
