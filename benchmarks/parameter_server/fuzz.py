"""Does anything that a stranger can send crash the server, make it grow or change its result?

    python -m benchmarks run fuzz [--frames 1000000] [--only TEXT]

Each parser of the parameter server, and of what elastic workers read from their store, gets as many malformed
inputs: true ones with some bits, bytes or pieces changed, and random ones. A parser must return a valid value
or raise its own error. Then a real shard gets as many malformed frames from connections without the token,
while an honest worker trains to the exact result.

`--only` runs the parsers with this text in their names; the table has the kept rows of the others.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.malformed import (
    CODEC_TEXTS,
    TOKEN,
    Target,
    bytes_of,
    fuzz,
    mutate,
    shard_config,
    targets,
)
from benchmarks.support.malformed_texts import text_targets
from benchmarks.support.options import benchmark_parser
from benchmarks.support.raw import RawResults
from benchmarks.support.tables import Table
from offbeat.codecs import CODECS
from offbeat.worlds.processes.server.channel import ClientIdentity, Request, ShardChannel
from offbeat.worlds.processes.server.discovery import resolve
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.wire import HEADER, MessageType, encode_header

COLUMNS = ("parser", "malformed inputs", "refused", "other errors", "growth", "inputs per second")
SHARD = "a real shard"


def besiege(folder: Path, frames: int, steps: int, seed: int = 0) -> tuple[list[Tensor], int]:
    """Train an honest worker for `steps` while strangers send malformed frames.

    Return the weights that the worker reads at the end, which are `steps` if nothing else was applied, and
    how many frames were sent.
    """
    shard = ShardServer(shard_config(folder), dist.HashStore(), TOKEN)
    serving = Thread(target=shard.run)
    serving.start()
    channel = ShardChannel(ClientIdentity(shard.store, "127.0.0.1", 0, TOKEN, 60.0), 0, "shard 0")

    def ask(kind: MessageType, number: int, *payload: Tensor, answer: Sequence[Tensor] = ()) -> None:
        request = Request(
            [encode_header(kind, number), *payload], [torch.zeros(HEADER, dtype=torch.int64), *answer]
        )
        lost = channel.finish(channel.start(request), time.monotonic() + 60.0)
        if lost is not None:
            raise lost

    address = resolve(shard.store, TOKEN, 0, "127.0.0.1")
    assert address is not None
    zeros, ones, read = (shard.config.buffers() for _ in range(3))
    torch._foreach_add_(ones, 1.0)
    ask(MessageType.LOAD, 0, *zeros)
    random, sent = Random(seed), 0
    join = (
        bytes(64)
        + bytes_of(encode_header(MessageType.JOIN, 0, -1))
        + bytes_of(encode_header(MessageType.LOAD))
    )
    for step in range(1, steps + 1):
        while sent * steps < frames * step:
            data = b"".join(mutate(random, join) for _ in range(min(100, frames - sent)))
            with suppress(OSError), socket.create_connection(address.endpoint, timeout=60.0) as stranger:
                stranger.sendall(data)
                while stranger.recv(4096):
                    pass
            sent += 100
        ask(MessageType.PUSH, step, *ones)
    ask(MessageType.PULL, -1, answer=read)
    workers = list(shard.sessions)
    channel.leave()
    serving.join()
    assert workers == [0], "a stranger was admitted"
    return read, sent


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("fuzz", __doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="malformed inputs of each parser")
    parser.add_argument("--only", default="", help="only parsers with this text in their names")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Detected pickle protocol")  # torch's, of damaged snapshots
    logging.disable(logging.WARNING)  # each refused frame is logged
    sent_to_servers = {name for name, cls in CODECS.items() if cls.splittable and name != "error_feedback"}
    assert {text.partition("(")[0] for text in CODEC_TEXTS} == sent_to_servers, "a codec is missing"
    raw = RawResults("fuzz")
    table = Table("fuzz", __doc__ or "", COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        for target in [*targets(Path(name)), *text_targets()]:
            if options.only in target.name:
                raw.keep(target.name, attack_parser(target, options.frames))
            if (row := raw.get(target.name)) is not None:
                table.row(*row)
        if options.only in SHARD:
            raw.keep(SHARD, attack_shard(Path(name), options.frames))
        if (row := raw.get(SHARD)) is not None:
            table.row(*row)
    table.write()


def attack_parser(target: Target, frames: int) -> list[str]:
    """Return a parser's row."""
    fuzz(target, 1000, seed=1)  # fills the caches of torch and of the allocator
    before, began = resident_mb(), time.perf_counter()
    refused = f"{1 - fuzz(target, frames) / frames:.2%}"
    rate = frames / (time.perf_counter() - began)
    return [target.name, f"{frames:,}", refused, "none", f"{resident_mb() - before:.1f} MB", f"{rate:,.0f}"]


def attack_shard(folder: Path, frames: int, steps: int = 1000) -> list[str]:
    """Return the row of a real shard."""
    besiege(folder / "first", 1000, 10, seed=1)
    before, began = resident_mb(), time.perf_counter()
    read, sent = besiege(folder / "again", frames, steps)
    rate, growth = sent / (time.perf_counter() - began), resident_mb() - before
    assert all(bool((weights == steps).all()) for weights in read), "the honest worker's result is wrong"
    return [SHARD, f"{sent:,}", "100%; the result is exact", "none", f"{growth:.1f} MB", f"{rate:,.0f}"]
