"""Handover: the state of a training, packed by a member for a worker that joins.

The newcomer gets what the member has between two steps: parameters and buffers, the optimizer's and the
strategy's state with all results that have arrived, and the clock. A checksum shows that all of it arrived.
"""

from __future__ import annotations

import io
import zlib
from typing import Any

import torch
from torch import Tensor

from offbeat.core import checkpoint
from offbeat.core.conductor import Conductor
from offbeat.errors import OffbeatError


async def pack(conductor: Conductor[Any], clock: int) -> Tensor:
    """Return the state of this worker as bytes. Nothing may be in flight."""
    replica = conductor.replica
    state = {
        "clock": clock,
        "tensors": [*replica.model.parameters(), *replica.model.buffers()],
        "optimizers": [optimizer.state_dict() for optimizer in replica.optimizer.optimizers],
        "strategy": await checkpoint._to_plain(conductor.state),
        "samples": replica.inputs.samples,
    }
    blob = io.BytesIO()
    torch.save(state, blob)
    return torch.frombuffer(blob.getbuffer(), dtype=torch.uint8)


def unpack(conductor: Conductor[Any], blob: Tensor) -> int:
    """Take over the state that another worker packed; return its clock."""
    replica = conductor.replica
    device = replica.weights[0].device
    state = torch.load(io.BytesIO(blob.numpy().tobytes()), weights_only=True, map_location=device)
    with torch.no_grad():
        own = [*replica.model.parameters(), *replica.model.buffers()]
        for tensor, value in zip(own, state["tensors"], strict=True):
            tensor.copy_(value)
        conductor.state = checkpoint._from_plain(conductor.strategy.init(replica), state["strategy"])
    for optimizer, saved in zip(replica.optimizer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    replica.optimizer.forget_held_state()
    replica.inputs.samples = state["samples"]
    return int(state["clock"])


def checksum(blob: Tensor) -> int:
    """Return a number that tells two states apart."""
    return zlib.crc32(blob.numpy().data)


def verify(blob: Tensor, expected: int) -> None:
    """Raise an error if the bytes are not those that were packed."""
    if (found := checksum(blob)) != expected:
        raise OffbeatError(
            f"the state that was handed over has the checksum {found:08x}, but {expected:08x} was sent"
        )
