"""Wire format of a shard's copy: its whole state once, and then the effects that change it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offbeat.server.journal import Effect, EffectKind
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.connection import PIECE_BYTES, Connection
from offbeat.worlds.processes.server.wire import MessageType, ProtocolError, encode_header

MOST_FACTOR = 65504.0  # fits weights of any dtype; it is a mean of local steps
MOST_WEIGHT = 1e18  # of an update; it is a number of samples


def send_state(connection: Connection, identity: int, state: ShardState) -> None:
    """Send a whole state as the copy `identity`."""
    connection.send(encode_header(MessageType.COPY, identity, len(state.applied)), _pairs(state.applied))
    _send_pieces(connection, *state.weights, *[tensor for part in state.optimizer for tensor in part])


def receive_state(connection: Connection, count: int, config: ShardConfig) -> ShardState:
    """Receive a state of `count` clocks, after its header, into new memory."""
    applied = _receive_clocks(connection, count)
    state = ShardState(config.buffers(), applied, [config.buffers() for _ in range(config.state_parts)])
    connection.receive(*state.weights, *[tensor for part in state.optimizer for tensor in part])
    return state


def send_effect(connection: Connection, number: int, effect: Effect) -> None:
    """Send effect number `number`."""
    header = encode_header(MessageType.EFFECT, effect.kind, len(effect.clocks), number)
    numbers = torch.tensor([effect.weight, effect.factor, len(effect.report)], dtype=torch.float64)
    connection.send(header, numbers, _pairs(effect.clocks))
    if effect.kind.has_update:
        _send_pieces(connection, torch.tensor(effect.report, dtype=torch.float64), *effect.update)


def receive_effect(
    connection: Connection, kind: int, count: int, buffers: list[torch.Tensor], report_size: int
) -> Effect:
    """Receive an effect, after its header; its update lies in `buffers`, until the next one is received."""
    numbers = torch.zeros(3, dtype=torch.float64)
    connection.receive(numbers)
    weight, factor, length = numbers.tolist()
    if not 0 <= factor <= MOST_FACTOR or (kind == EffectKind.GATHER and not 0 < weight <= MOST_WEIGHT):
        raise ProtocolError(f"an effect of weight {weight} and factor {factor}")
    clocks, report = _receive_clocks(connection, count), torch.zeros(0, dtype=torch.float64)
    if EffectKind(kind).has_update:
        if length not in ((report_size,) if kind == EffectKind.APPLY else (0, report_size)):
            raise ProtocolError(f"an effect with a report of {length} numbers")
        report = torch.zeros(int(length), dtype=torch.float64)
        connection.receive(report, *buffers)
    return Effect(
        kind=EffectKind(kind),
        clocks=clocks,
        update=buffers,
        report=tuple(report.tolist()),
        weight=weight,
        factor=factor,
    )


def _send_pieces(connection: Connection, *tensors: torch.Tensor) -> None:
    """Send tensors piece by piece: the limit of time is that of a piece, however large the shard is."""
    for tensor in tensors:
        connection.send(*tensor.split(max(1, PIECE_BYTES // tensor.element_size())))


def _pairs(clocks: Mapping[int, int]) -> torch.Tensor:
    return torch.tensor([number for pair in clocks.items() for number in pair], dtype=torch.int64)


def _receive_clocks(connection: Connection, count: int) -> dict[int, int]:
    pairs = torch.zeros(2 * count, dtype=torch.int64)
    connection.receive(pairs)
    numbers = pairs.tolist()
    return dict(zip(numbers[::2], numbers[1::2], strict=True))
