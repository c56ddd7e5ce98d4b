"""Checkpoint: everything a rank needs to go on as if it had never stopped.

What all ranks share (the model and the optimizer, under a strategy whose replicas agree) the user saves as
always. What is a rank's own (the strategy's state, with what is in flight; weights, buffers and the
optimizer where replicas differ) lies under a key of that rank, as bytes, so that
torch.distributed.checkpoint, which takes equal keys for equal values, keeps every rank's.
"""

from __future__ import annotations

import io
from dataclasses import Field, fields, is_dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.core.conductor import Conductor, perform
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import ServerAdmin
from offbeat.errors import OffbeatError, SettingError

_ARRIVED = "arrived"  # the key under which a value that was in flight is kept


async def save(
    conductor: Conductor[Any], optimizer: Optimizer, server: ServerAdmin | None = None
) -> dict[str, Any]:
    """Save this rank's part, and what the server holds, if one is given: all ranks then call it together."""
    await conductor.abort_step()
    replica = conductor.replica
    await perform(conductor.strategy.drain(conductor.state, replica, conductor.port))  # packets are not kept
    own: dict[str, Any] = {"state": await _to_plain(conductor.state), "samples": replica.samples}
    if not conductor.strategy.identical_replicas:
        own["weights"] = replica.weights
        own["optimizer"] = optimizer.state_dict()
    own["buffers"] = replica.buffers.all()
    if server is not None:
        own["served"] = await _served(conductor, server)
    blob = io.BytesIO()
    torch.save(own, blob)
    return {
        "strategy": conductor.strategy.name,
        "settings": conductor.strategy.settings(),
        "world": conductor.port.world,
        f"rank{conductor.port.rank}": blob.getvalue(),
    }


async def _served(conductor: Conductor[Any], server: ServerAdmin) -> list[Tensor]:
    """Read what the server holds, on worker 0, once all that the workers have pushed is in it."""
    await conductor.barrier()
    held = await server.save() if conductor.port.rank == 0 else []
    await conductor.barrier()
    return held


def load(conductor: Conductor[Any], optimizer: Optimizer, saved: dict[str, Any]) -> list[Tensor]:
    """Go on from there; what a server is to hold, where there is one and this worker has kept it."""
    strategy, replica, port = conductor.strategy, conductor.replica, conductor.port
    if (saved["strategy"], saved["settings"]) != (strategy.name, strategy.settings()):
        raise SettingError(
            f"the checkpoint was made under {saved['strategy']} {saved['settings']}, "
            f"but {strategy.name} {strategy.settings()} is attached"
        )
    if saved["world"] != port.world or f"rank{port.rank}" not in saved:
        kept = [key for key in saved if key.startswith("rank")]
        raise SettingError(
            f"the checkpoint is of {saved['world']} ranks and holds {', '.join(kept)}; "
            f"this is rank {port.rank} of {port.world}"
        )
    own = torch.load(io.BytesIO(saved[f"rank{port.rank}"]), weights_only=True)
    with torch.no_grad():
        conductor.state = _from_plain(strategy.init(replica), own["state"])
        for tensor, value in zip(replica.buffers.all(), own["buffers"], strict=True):
            tensor.copy_(value)
        for tensor, value in zip(replica.weights, own.get("weights", ()), strict=False):
            tensor.copy_(value)
    replica.samples = own["samples"]
    if "optimizer" in own:
        optimizer.load_state_dict(own["optimizer"])
    served = zip(own.get("served", ()), cycle(replica.weights), strict=False)
    return [value.to(weight.device) for value, weight in served]


async def _to_plain(value: Any) -> Any:
    """A strategy's state as plain data; what is in flight is waited for, but not applied."""
    if isinstance(value, Pending):
        return {_ARRIVED: await _to_plain(await value)}
    if is_dataclass(value):
        return {f.name: await _to_plain(getattr(value, f.name)) for f in fields(value) if _saved(f)}
    if isinstance(value, dict):
        return {key: await _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [await _to_plain(item) for item in value]
    if value is None or isinstance(value, Tensor | int | float | bool | str):
        return value
    raise OffbeatError(f"a strategy's state holds a {type(value).__name__}, which cannot be saved")


def _from_plain(like: Any, packed: Any) -> Any:
    """The inverse of `_to_plain`, in the shape of a fresh state."""
    if isinstance(packed, dict) and set(packed) == {_ARRIVED}:
        return Arrived(_from_plain(None, packed[_ARRIVED]))
    if is_dataclass(like):
        for f in fields(like):
            if _saved(f):
                setattr(like, f.name, _from_plain(getattr(like, f.name), packed[f.name]))
        return like
    if isinstance(packed, dict):
        return {key: _from_plain(None, item) for key, item in packed.items()}
    if isinstance(packed, list):
        fresh = like if isinstance(like, list) and len(like) == len(packed) else [None] * len(packed)
        return [_from_plain(known, item) for known, item in zip(fresh, packed, strict=True)]
    return packed


def _saved(part: Field[Any]) -> bool:
    """Memory whose content does not matter between steps says `metadata={"saved": False}`."""
    return bool(part.metadata.get("saved", True))
