"""Doors of a shard, besieged: malformed headers, random order, conversations cut short, payloads of rubbish.

The connections are in memory, so that one takes microseconds to make; test_connection.py has real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import TopK
from offbeat.server.packets import allocate, encode
from offbeat.worlds.processes.server import newcomers
from offbeat.worlds.processes.server import shard as serving
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.wire import (
    NEW,
    MessageType,
    encode_header,
)
from tests.support.beside import post
from tests.support.conversations import SIZES, Numbers, conversation, is_well_formed

FRAMES = 100_000


# --- links in memory


class Script:
    """A link whose other end says what it was told to say, and then is gone."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said
        self.heard: list[Numbers] = []
        self.closed = False

    def limit(self, patience_s: float | None) -> None: ...

    def send(self, *tensors: Tensor) -> None:
        self.heard.append(tensors[0].tolist())

    def receive(self, *tensors: Tensor) -> None:
        for _ in self.receive_pieces(*tensors):
            pass

    def receive_pieces(self, *tensors: Tensor) -> Iterator[Tensor]:
        for tensor in tensors:
            if tensor.numel():
                self._fill(tensor)
                yield tensor

    def _fill(self, tensor: Tensor) -> None:
        while self.said and callable(self.said[0]):
            self.said.pop(0)()
        if not self.said:
            raise ConnectionResetError("the other end is gone")
        something = self.said.pop(0)
        tensor.copy_(something) if isinstance(something, Tensor) else tensor.fill_(something)

    def end(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Log:
    """Counts the refusals instead of keeping a record of each."""

    def __init__(self) -> None:
        self.refused = 0

    def info(self, text: str, *numbers: Any) -> None: ...

    def warning(self, text: str, *numbers: Any) -> None:
        self.refused += text.endswith("it sent %s")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(serving, "log", log)
    return log


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardServer:
    """A shard whose links are scripts: `admit(script)`."""
    monkeypatch.setattr(serving, "Connection", lambda script, patience_s: script)
    monkeypatch.setattr(newcomers, "challenge", lambda *_: True)
    shard = ShardServer(post(tmp_path, SIZES), dist.HashStore(), b"secret")
    opening = [
        encode_header(MessageType.JOIN, 0, NEW),
        encode_header(MessageType.LOAD),
        1.0,
        1.0,
        encode_header(MessageType.LEAVE),
    ]
    shard.admit(Script(opening))  # type: ignore[arg-type]
    return shard


def serves(shard: ShardServer) -> bool:
    """Whether a good worker is served: it joins, reads, pushes, reads what it pushed, and leaves."""
    shard.load_weights([torch.ones_like(weight) for weight in shard.server.weights])
    said = [
        encode_header(MessageType.JOIN, 0, NEW),
        encode_header(MessageType.PUSH, 1),
        0.5,
        0.5,
        encode_header(MessageType.PULL, 1),
        encode_header(MessageType.LEAVE),
    ]
    good = Script([*said])
    shard.admit(good)  # type: ignore[arg-type]
    answers = [
        [MessageType.JOIN_ACK, 0, 0, 1, 0],
        [MessageType.PUSH_ACK, 1, 0, 0, 0],
        [MessageType.PULL_REPLY, 0, shard.remote_bytes, 0, shard.server.pushes],
    ]
    return good.heard == answers and all(bool((weight == 1.5).all()) for weight in shard.server.weights)


def besiege(shard: ShardServer, log: Log, frames: int, seed: int) -> None:
    """Until so many malformed frames have come."""
    random = Random(seed)
    shard.snapshots.write = lambda take: None  # type: ignore[method-assign]
    assert serves(shard)
    while log.refused < frames:
        said, bad = conversation(random)
        script, before = Script([*said]), log.refused
        shard.admit(script)  # type: ignore[arg-type]
        assert log.refused == before + bad, said
        assert script.closed and not shard.sessions
        if log.refused % 1000 == 0:
            assert serves(shard)
    assert serves(shard)
    assert all(weight.isfinite().all() for weight in shard.server.weights)


def test_a_siege(shard: ShardServer, log: Log) -> None:
    besiege(shard, log, FRAMES // 10, seed=1)


class Largest(TorchDispatchMode):
    """The most bytes that any operation took anew."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        taken = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in taken:
            self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return made


def test_a_siege_takes_no_memory_but_one_set_of_buffers_a_link(
    shard: ShardServer, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, made, links = Largest(), [], []
    buffers, admit = ShardConfig.buffers, ShardServer.admit

    def counted(post: ShardConfig) -> list[Tensor]:
        made.append(1)
        return buffers(post)

    def linked(shard: ShardServer, script: Any) -> None:
        links.append(script.said[0][0] == MessageType.JOIN and is_well_formed(script.said[0].tolist()))
        admit(shard, script)

    monkeypatch.setattr(ShardConfig, "buffers", counted)
    monkeypatch.setattr(ShardServer, "admit", linked)
    with largest:
        besiege(shard, log, 1000, seed=2)
    assert len(made) == sum(links) > 750, "and only for who has joined"
    assert largest.nbytes == max(numel * getattr(torch, dtype).itemsize for dtype, numel in SIZES)
    assert len(shard.server.shard.applied) <= 5, "as many as there were numbers of workers"


def test_a_steady_step_takes_no_memory_of_the_models_size(shard: ShardServer) -> None:
    largest = Largest()
    steady = [
        part
        for clock in (2, 3)
        for part in (encode_header(MessageType.PUSH, clock), 1.0, 1.0, encode_header(MessageType.PULL, clock))
    ]
    first = [
        encode_header(MessageType.JOIN, 0, NEW),
        encode_header(MessageType.PUSH, 1),
        1.0,
        1.0,
        encode_header(MessageType.PULL, 1),
    ]
    script = Script(
        [*first, lambda: setattr(largest, "nbytes", 0), *steady, encode_header(MessageType.LEAVE)]
    )
    with largest:
        shard.admit(script)  # type: ignore[arg-type]
    assert [kind for kind, *_ in script.heard[-2:]] == [MessageType.PUSH_ACK, MessageType.PULL_REPLY]
    assert 0 < largest.nbytes <= encode_header(MessageType.PUSH).nbytes


# --- packets


def test_packets_are_taken_in_the_forms_that_are_known(tmp_path: Path, shard: ShardServer, log: Log) -> None:
    """A shard whose workers send the largest tenth of an update."""
    coded = post(tmp_path / "coded", SIZES, codec="error_feedback(topk(0.1))")
    shard = ShardServer(coded, dist.HashStore(), b"secret")
    zeros = [torch.zeros(numel, dtype=getattr(torch, dtype)) for dtype, numel in SIZES]
    opening = [
        encode_header(MessageType.JOIN, 0, NEW),
        encode_header(MessageType.LOAD),
        0.0,
        0.0,
        encode_header(MessageType.LEAVE),
    ]
    shard.admit(Script(opening))  # type: ignore[arg-type]
    assert log.refused == 0

    def pushed(form: int, *spoilt: Any) -> list[Numbers]:
        codec = TopK(0.1)
        updates = [torch.arange(1.0, len(zero) + 1, dtype=zero.dtype) for zero in zeros]
        packets = allocate(codec, updates)
        encode(codec, updates, packets, 1)
        script = Script(
            [
                encode_header(MessageType.JOIN, 1, 0),
                encode_header(MessageType.PUSH, 1, 0, form),
                *(spoilt or packets),
            ]
        )
        shard.load_weights(zeros)
        shard.admit(script)  # type: ignore[arg-type]
        return script.heard[1:]

    assert pushed(1) == [[MessageType.PUSH_ACK, 1, 0, 0, 0]]
    for weights in shard.server.weights:
        count = round(0.1 * len(weights))
        assert weights.count_nonzero() == count
        assert (weights[-count:] != 0).all()
    assert pushed(0, 1.0, 1.0) == [[MessageType.PUSH_ACK, 1, 0, 0, 0]], "as it is"
    assert all(bool((weights == 1).all()) for weights in shard.server.weights)
    assert log.refused == 0
    assert pushed(2) == [], "there is no such form"
    assert log.refused == 1
    assert pushed(1, 255, 255) == [], "indices beyond the end"
    assert log.refused == 2
