"""Seconds per byte of codecs and of a server's shard, as `worlds/virtual/computing.py` charges them.

A codec's exchange of a model's gradients runs through a port whose operations take no time, and that counts
bytes as virtual time does. So what is charged for such an exchange is what it took. As in training, all ranks
encode at once, and each after a step: right after another exchange it would take a third, since all that it
reads would be in the cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
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
from offbeat.worlds.virtual.computing import packet_bytes
from offbeat.worlds.virtual.costs import CodecCost, ShardCost

REPEATS = 5
T = TypeVar("T")


class InstantPort(CollectivePort):
    """A port of rank 0 whose operations take no time; it counts the bytes that are encoded and decoded."""

    def __init__(self, world: int) -> None:
        super().__init__(0, world, Ledger(0, time.perf_counter))
        self.encoded = self.decoded = 0

    def _server_port(self) -> ServerPort | None:
        return None

    def _start(self, signature: Signature, tensors: list[Tensor], value: T, lane: Lane) -> Pending[T]:
        encoded, decoded = packet_bytes(signature, self.rank)
        self.encoded += encoded
        self.decoded += decoded
        for received in tensors[1:]:  # packets must be valid to be decoded: all workers send rank 0's
            if received.shape == tensors[0].shape:
                received.copy_(tensors[0])
        return Arrived(value)


def time_codec(
    codec: Codec, model: nn.Module, world: int, prepare: Callable[[], None] = lambda: None
) -> CodecCost:
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
    return CodecCost(
        codec=str(codec),
        encode_s=statistics.median(encode_s[1:]) / max(1, port.encoded),
        decode_s=statistics.median(decode_s[1:]) / max(1, port.decoded),
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
    crowded = (os.cpu_count() or 1) < 2 * ranks_here
    return ShardCost(apply_s=seconds / (4 * numel), beside=float(crowded))


def _median_s(work: Callable[[], None]) -> float:
    took = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
