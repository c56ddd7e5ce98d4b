"""Seconds per byte of codecs and of a server's shard, as `worlds/virtual/computing.py` charges them.

A codec's exchange of a model's gradients runs through a port whose operations take no time, and that counts
bytes as virtual time does. So what is charged for such an exchange is what it took. As in training, all ranks
encode at once, and each after a step: right after another exchange it would take a third, since all that it
reads would be in the cache.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offbeat.codecs import Codec
from offbeat.core.blocks import block_sizes, make_blocks, trainable_bytes
from offbeat.core.ledger import Ledger
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.core.port import CollectivePort, Lane, ServerPort, Signature
from offbeat.server.apply import add_update
from offbeat.server.messages import Push
from offbeat.worlds.processes.cores import usable_cores
from offbeat.worlds.virtual.computing import packet_bytes
from offbeat.worlds.virtual.costs import CodecCost, ShardCost

REPEATS = 5
MOST_DEVIATION = 1.0
T = TypeVar("T")


class InstantPort(CollectivePort):
    """A port of rank 0 whose operations take no time; it counts the bytes that are encoded and decoded."""

    def __init__(self, world: int) -> None:
        super().__init__(0, world, Ledger(0, time.perf_counter))
        self.encoded = self.decoded = 0

    def _server_port(self) -> ServerPort | None:
        return None

    def _start(self, signature: Signature, tensors: Sequence[Tensor], value: T, lane: Lane) -> Pending[T]:
        encoded, decoded = packet_bytes(signature, self.rank)
        self.encoded += encoded
        self.decoded += decoded
        for received in tensors[1:]:  # packets must be valid to be decoded: all workers send rank 0's
            if received.shape == tensors[0].shape:
                received.copy_(tensors[0])
        return Arrived(value)


@dataclass(frozen=True)
class CodecTimes:
    """Seconds per byte that one rank took to encode and to decode with a codec, each time."""

    codec: str
    encode_s: list[float]
    decode_s: list[float]


def codec_cost_of(ranks: Sequence[CodecTimes]) -> CodecCost:
    """Return what a codec costs: the medians over all ranks, and how far apart the times of encoding are."""
    encode_s = [seconds for times in ranks for seconds in times.encode_s]
    logs = [math.log(seconds) for seconds in encode_s if seconds]
    return CodecCost(
        codec=ranks[0].codec,
        encode_s=statistics.median(encode_s),
        decode_s=statistics.median(seconds for times in ranks for seconds in times.decode_s),
        deviation=min(MOST_DEVIATION, statistics.stdev(logs)) if len(logs) > 1 else 0.0,
    )


def time_codec(
    codec: Codec, model: nn.Module, world: int, prepare: Callable[[], None] = lambda: None
) -> CodecTimes:
    """Measure the seconds per byte that a codec encodes and decodes, on gradients of the model's blocks.

    `prepare` is called before each exchange: it makes the ranks step, and then begin at once.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    blocks = make_blocks(trained, *block_sizes(trainable_bytes(model)))
    like = trained[0][1].detach()
    tensors = [torch.randn(block.numel, device=like.device, dtype=like.dtype) for block in blocks]
    streams = [codec.stream(t, block.matrices()) for t, block in zip(tensors, blocks, strict=True)]
    encode_s, decode_s = [], []
    port = InstantPort(max(2, world))
    with torch.no_grad():
        for _ in range(REPEATS + 1):
            port.encoded = port.decoded = 0
            with torch.enable_grad():
                prepare()
            pairs = list(zip(streams, tensors, strict=True))
            began = time.perf_counter()
            sent = [codec.start(stream, tensor, port) for stream, tensor in pairs]
            started = time.perf_counter()
            for (stream, tensor), pending in zip(pairs, sent, strict=True):
                block_on(_finish(codec, stream, tensor, port, pending))
            encode_s.append(started - began)
            decode_s.append(time.perf_counter() - started)
    return CodecTimes(
        str(codec),
        encode_s=[seconds / max(1, port.encoded) for seconds in encode_s[1:]],
        decode_s=[seconds / max(1, port.decoded) for seconds in decode_s[1:]],
    )


async def _finish(codec: Codec, stream: Any, tensor: Tensor, port: InstantPort, sent: Pending[Any]) -> None:
    sent = await codec.exchange(stream, tensor, port, sent)
    await codec.finish(stream, tensor.clone(), port, sent)


def time_shard(model: nn.Module, world: int) -> ShardCost:
    """Measure the seconds per byte that a shard takes to add a push to its weights, in a CPU's memory.

    A shard holds up the worker beside it where the host has less than two cores for each rank.
    """
    numel = max(1, trainable_bytes(model) // 4)
    weights, update = [torch.zeros(numel)], [torch.ones(numel)]
    push = Push(worker=0, clock=1, update=update)
    seconds = _median_s(lambda: add_update(weights, push))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    crowded = usable_cores() < 2 * ranks_here
    return ShardCost(apply_s=seconds / (4 * numel), beside=float(crowded))


def _median_s(work: Callable[[], None]) -> float:
    took = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
