"""Malformed inputs for every parser of the parameter server, and the parsers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from offbeat import ASP
from offbeat.codecs import Codec, codec
from offbeat.errors import OffbeatError
from offbeat.server.journal import Effect, EffectKind
from offbeat.server.messages import ClientMessage, JoinAck, PullReply, Push, PushAck, SaveReply, Tensors
from offbeat.server.packets import allocate, decode, encode
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.auth import challenge, sign, verify
from offbeat.worlds.processes.server.config import SPEC, ServerSpec, ShardConfig
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.copy_wire import send_effect, send_state
from offbeat.worlds.processes.server.looks import Looks
from offbeat.worlds.processes.server.session import WorkerSession
from offbeat.worlds.processes.server.shard_copy import ShardCopy
from offbeat.worlds.processes.server.snapshot_file import read_snapshot, write_snapshot
from offbeat.worlds.processes.server.tls import Certificate, TlsStream
from offbeat.worlds.processes.server.wire import (
    FROM_SHARDS,
    HEADER,
    MessageType,
    ProtocolError,
    check_header,
    encode_header,
    read_header,
)

TOKEN = b"a token"
SIZES = [("float32", 8), ("float64", 3)]
NUMEL = 96
GUARD = 7.0  # around memory that a packet is decoded into
# All whose packets travel to a server; error feedback stays at the worker.
CODEC_TEXTS = ("topk(0.1)", "randomk(0.1)", "quantize(8)", "quantize(4)", "quantize(1)", "half", "bfloat16")


def mutate(random: Random, true: bytes) -> bytes:
    """Return malformed bytes: most often a true input with something changed."""
    changed = bytearray(true)
    for _ in range(random.choice((1, 1, 2, 5))):
        place = random.randrange(len(changed) + 1)
        match random.randrange(7):
            case 0 if changed:
                changed[place % len(changed)] ^= 1 << random.randrange(8)
            case 1 if changed:
                changed[place % len(changed)] = random.choice((0, 1, 127, 128, 255))
            case 2:
                del changed[place:]
            case 3:
                changed[place:place] = random.randbytes(random.randrange(1, 20))
            case 4:
                changed[place : place + 8] = random.choice((-1, 0, 1 << 40, -(1 << 63))).to_bytes(
                    8, "little", signed=True
                )
            case 5:
                changed[place:place] = true[: random.randrange(len(true) + 1)]
            case 6:
                changed = bytearray(random.randbytes(random.randrange(2 * len(true) + 1)))
    return bytes(changed)


@dataclass
class Target:
    """A parser: true inputs, and a function that parses one and returns whether it was accepted."""

    name: str
    true_inputs: list[bytes]
    accepts: Callable[[bytes], bool]
    keyed: bool = False  # whether an input is accepted from nobody without the keys of that connection


def fuzz(target: Target, frames: int, seed: int = 0) -> int:
    """Parse malformed inputs; return how many were accepted. Other errors go on."""
    random = Random(seed)
    if any(target.accepts(true) is target.keyed for true in target.true_inputs):
        raise AssertionError(f"{target.name}: wrong about a true input")
    return sum(target.accepts(mutate(random, random.choice(target.true_inputs))) for _ in range(frames))


def targets(folder: Path) -> list[Target]:
    """Return all parsers of the parameter server."""
    found = [header_target(), signature_target(), spec_target(), session_target(folder)]
    found += [challenge_target(), tls_target(), snapshot_target(folder), copy_target(folder)]
    return found + [packet_target(codec(text)) for text in CODEC_TEXTS]


# --- parsers of text and numbers


def header_target() -> Target:
    kinds = (MessageType.JOIN, MessageType.PUSH, MessageType.PULL, MessageType.REDUCE, MessageType.LOAD)
    true = [bytes_of(encode_header(kind, 1)) for kind in kinds] + [bytes_of(encode_header(MessageType.LEAVE))]

    def accepts(data: bytes) -> bool:
        data = data[: 8 * HEADER].ljust(8 * HEADER, b"\0")  # a connection delivers exactly as many bytes
        try:
            kind, *numbers = check_header(torch.frombuffer(bytearray(data), dtype=torch.int64))
        except ProtocolError:
            return False
        assert isinstance(kind, MessageType) and all(-1 <= number <= 1 << 53 for number in numbers)
        return True

    return Target("header", true, accepts)


def signature_target() -> Target:
    true = sign(TOKEN, "address/0", "tls 4000 10.0.0.1").encode()

    def accepts(data: bytes) -> bool:
        try:
            verify(TOKEN, "address/0", data)
        except OffbeatError:
            return False
        assert data == true, "a forgery"
        return True

    return Target("signed value", [true], accepts)


def spec_target() -> Target:
    optimizer = {"kind": "SGD", "groups": [{"lr": 0.1}], "marks": 1}
    specs = [
        ServerSpec(
            strategy="ssp",
            settings={"staleness": 3, "codec": "none"},
            flats=[("float32", 4000), ("bfloat16", 17)],
            optimizer=given,
            description={"model": "Linear", "lr": "0.1"},
            timeout_s=60.0,
        )
        for given in (None, optimizer)
    ]
    true = [spec.signed(TOKEN).partition(" ")[2].encode() for spec in specs]

    def accepts(data: bytes) -> bool:
        """Sign the text first, as a faulty worker with the token would."""
        text = data.decode(errors="replace")
        try:
            spec = ServerSpec.read(sign(TOKEN, SPEC, text).encode(), TOKEN)
        except OffbeatError:
            return False
        assert all(getattr(torch, dtype).is_floating_point and numel >= 0 for dtype, numel in spec.flats)
        return True

    return Target("specification", true, accepts)


# --- parsers of connections


class Script(Connection):
    """A connection that receives given bytes, and forgets what is sent."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def send(self, *tensors: Tensor) -> None:
        pass

    def receive_pieces(self, *tensors: Tensor) -> Any:
        for tensor in tensors:
            if self._at + tensor.nbytes > len(self._data):
                raise ConnectionResetError("the script is over")
            if tensor.numel():
                part = bytearray(self._data[self._at : self._at + tensor.nbytes])
                tensor.copy_(torch.frombuffer(part, dtype=tensor.dtype))
            self._at += tensor.nbytes
            yield tensor

    def channel(self, server_side: bool) -> bytes:
        return b""


class Echo:
    """A shard that answers everything at once, so that sessions do nothing but parse."""

    def __init__(self, config: ShardConfig) -> None:
        self._tensors = config.buffers()
        self.looks = Looks()

    def join(self, session: WorkerSession, clock: int | None, pushes: int, rejoins: bool) -> bool:
        session.answer(JoinAck(worker=session.worker, clock=clock or 0))
        return True

    def leave(self, session: WorkerSession, announced: bool) -> None:
        pass

    def request(self, session: WorkerSession, message: ClientMessage) -> int:
        session.expect(message)
        if isinstance(message, Push):
            session.answer(PushAck(worker=0, clock=message.clock))
        else:
            session.answer(SaveReply(worker=0, part=0, tensors=self._tensors))
            session.answer(PullReply(worker=0, weights=self._tensors))
        return 0

    def load_weights(self, tensors: Tensors, part: int, initial: bool) -> None:
        pass


def session_target(folder: Path) -> Target:
    config = shard_config(folder, codec="topk(0.5)")
    half = ASP(codec=codec("topk(0.5)")).server_half()
    assert half is not None
    buffers = config.buffers()
    aggregation = ParameterServer(ShardState(buffers), half, config.make_apply()).aggregation
    update = b"".join(map(bytes_of, buffers))
    allocated = allocate(half.push_codecs[0], buffers)
    encode(half.push_codecs[0], buffers, allocated, 0)
    packets = b"".join(map(bytes_of, allocated))
    header = {kind: bytes_of(encode_header(kind, 1)) for kind in MessageType}
    coded = bytes_of(encode_header(MessageType.PUSH, 1, 0, 1)) + packets
    load, leave = (bytes_of(encode_header(kind)) for kind in (MessageType.LOAD, MessageType.LEAVE))
    true = [
        header[MessageType.PUSH] + update + header[MessageType.PULL] + leave,
        coded + leave,
        load + update + leave,
    ]

    def accepts(data: bytes) -> bool:
        session = WorkerSession(Echo(config), config, half, aggregation, 0, Script(data))
        try:
            session.serve(None, 0)
        except (ProtocolError, OSError):
            return False
        return True

    return Target("session", true, accepts)


def copy_target(folder: Path) -> Target:
    """What a shard sends to its second: its state, and effects."""
    config = replace(shard_config(folder), second=1, follows={"sizes": SIZES, "optimizer": None})
    sent = Recording()
    send_state(sent, 7, ShardState(config.buffers(), {3: 1}))
    state = bytes(sent.data)
    for kind in EffectKind:
        update = config.buffers() if kind.has_update else []
        send_effect(sent, 1, Effect(kind=kind, clocks={3: 2}, update=update, weight=1.0))

    def accepts(data: bytes) -> bool:
        copy, script = ShardCopy(config, 0), Script(data)
        try:
            kind, identity, count, _ = read_header(script, FROM_SHARDS)
            if kind is MessageType.EFFECT:
                return False
            copy.serve(kind, identity, count, script)
        except ProtocolError:
            return False
        except OSError:  # the data has ended
            return copy.is_there
        return False

    return Target("copy of a shard", [state, bytes(sent.data)], accepts)


class Recording(Connection):
    """A connection that only records what is sent."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self.data += bytes_of(tensor)


def challenge_target() -> Target:
    def accepts(data: bytes) -> bool:
        try:
            accepted = challenge(Script(data), TOKEN)
        except OSError:
            return False
        assert not accepted, "a proof without the token"
        return False

    return Target("handshake", [bytes(64)], accepts, keyed=True)


class ScriptSocket:
    """The part of a socket that TLS uses: it receives given bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def sendall(self, data: bytes) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def tls_target() -> Target:
    certificate = Certificate()
    hello = _first_flight()

    def accepts(data: bytes) -> bool:
        try:
            TlsStream(ScriptSocket(data), certificate)  # type: ignore[arg-type]
        except OSError:
            return False
        raise AssertionError("a connection without the other end's keys")

    return Target("TLS", [hello], accepts, keyed=True)


def _first_flight() -> bytes:
    """Return what a worker sends first."""
    sent = bytearray()

    class Recorder(ScriptSocket):
        def sendall(self, data: bytes) -> None:
            sent.extend(data)

    with suppress(OSError):
        TlsStream(Recorder(b""), None)  # type: ignore[arg-type]
    return bytes(sent)


# --- parsers of tensors


def snapshot_target(folder: Path) -> Target:
    path = folder / "snapshot"
    weights = [torch.arange(8.0), torch.arange(3.0, dtype=torch.float64)]
    write_snapshot(path, ShardState(weights, {0: 3, 1: 4}, [weights]))

    def accepts(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            read_snapshot(path)
        except OffbeatError:
            return False
        return True

    return Target("snapshot", [path.read_bytes()], accepts)


def packet_target(chosen: Codec) -> Target:
    torch.manual_seed(0)
    memory = torch.full((NUMEL + 2,), GUARD)
    into = [memory[1:-1]]
    packets = allocate(chosen, into)
    tensor = [torch.randn(NUMEL)]
    encode(chosen, tensor, packets, 0)

    def accepts(data: bytes) -> bool:
        nbytes = packets[0].numel()  # a connection delivers exactly as many bytes
        packet = torch.frombuffer(bytearray(data[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
        try:
            decode(chosen, [packet], into)
            accepted = True
        except OffbeatError:
            accepted = False
        assert memory[0] == memory[-1] == GUARD, "written beside the tensor"
        return accepted

    return Target(f"packet of {chosen}", [bytes_of(packets[0])], accepts)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def shard_config(folder: Path, **settings: Any) -> ShardConfig:
    return ShardConfig(
        host="127.0.0.1",
        tcp_port=9,
        prefix="",
        shard=0,
        parent=os.getppid(),
        workers=1,
        local_workers=[0],
        strategy="asp",
        settings=settings,
        sizes=SIZES,
        timeout_s=60.0,
        snapshot=str(folder / "shard-0"),
        snapshot_s=3600.0,
    )
