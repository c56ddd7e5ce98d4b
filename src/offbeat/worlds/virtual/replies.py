"""Answers of virtual shards on their way to workers, with the tensors that they had when they were made.

A shard's answer refers to the shard's own tensors, which the next message changes. All answers of one event,
in which each shard handles one message, are copied together when the event ends: weights that many workers
read are copied once, and those of all shards by one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from offbeat.codecs import Codec
from offbeat.server.messages import Answer, PullReply, ReduceReply, SaveReply, Tensors
from offbeat.server.packets import allocate, encode
from offbeat.worlds.virtual.messages import ShardRequest


@dataclass(slots=True, eq=False)
class Reply:
    """A shard's answer on its way."""

    request: ShardRequest[Any]
    shard: int
    answer: Answer
    copies: Tensors = field(default_factory=list)


def copy_tensors(replies: Sequence[Reply], pull_codec: Codec | None) -> None:
    """Copy the tensors of an event's answers; encode weights for training. Nobody changes the copies."""
    readers: dict[int, list[Reply]] = {}  # of the same weights
    for reply in replies:
        answer = reply.answer
        if isinstance(answer, PullReply):
            if pull_codec is None or answer.for_evaluation:
                readers.setdefault(id(answer.weights), []).append(reply)
            else:
                reply.copies = allocate(pull_codec, answer.weights)
                encode(pull_codec, answer.weights, reply.copies, answer.staleness, residual=False)
        elif isinstance(answer, ReduceReply):
            reply.copies = [answer.tensor.clone()]
        elif isinstance(answer, SaveReply):
            reply.copies = answer.tensors  # a copy already
    weights = [same[0].answer.weights for same in readers.values()]  # type: ignore[union-attr]
    for same, copies in zip(readers.values(), copies_of(weights), strict=True):
        for reply in same:
            reply.copies = copies


def copies_of(lists: Sequence[Tensors]) -> list[Tensors]:
    """Copy lists of tensors: by one operation, into one piece of memory, if all are of one kind."""
    tensors = [tensor for each in lists for tensor in each]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
        return [[tensor.clone() for tensor in each] for each in lists]
    copies = iter(torch.cat(tensors).split_with_sizes([tensor.numel() for tensor in tensors]))
    return [list(islice(copies, len(each))) for each in lists]
