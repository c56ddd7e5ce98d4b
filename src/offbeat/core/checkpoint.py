"""Checkpoint: everything a rank needs to continue as if it had never stopped.

The user saves the state that all ranks share (the model and the optimizer, under a strategy with identical
replicas) as usual. The state of one rank (the strategy's state, with results in flight; weights, buffers and
the optimizer where replicas differ) is stored as bytes under a key of that rank. Under one key for all ranks,
torch.distributed.checkpoint would save only one rank's state: it assumes that equal keys have equal values.
"""

from __future__ import annotations

import io
from dataclasses import Field, fields, is_dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from offbeat.core.conductor import Conductor, drive
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import ServerAdmin
from offbeat.core.settings import without_refused
from offbeat.errors import OffbeatError, SettingError

_ARRIVED = "arrived"  # the key of a value that was in flight


async def save(conductor: Conductor[Any], server: ServerAdmin | None = None) -> dict[str, Any]:
    """Return a checkpoint of this worker, with the server's state if one is given."""
    await conductor.abort_step()
    replica = conductor.replica
    await drive(conductor.strategy.drain(conductor.state, replica, conductor.port))  # packets are not saved
    own: dict[str, Any] = {"state": await _to_plain(conductor.state), "samples": replica.inputs.samples}
    if not conductor.strategy.identical_replicas:
        own["weights"] = replica.weights
        states = [optimizer.state_dict() for optimizer in replica.optimizer.optimizers]
        own["optimizer"] = states[0] if len(states) == 1 else states
    own["buffers"] = replica.buffers.all()
    if server is not None:
        own["served"] = await _read_server_state(conductor, server)
    blob = io.BytesIO()
    torch.save(own, blob)
    rank = replica.members.global_rank(conductor.port.rank)
    members = {} if replica.members.count == 1 else {"members": replica.members.count}
    return {
        "strategy": conductor.strategy.name,
        "settings": conductor.strategy.settings(),
        "world": conductor.port.world,
        **members,
        f"rank{rank}": blob.getvalue(),
    }


async def _read_server_state(conductor: Conductor[Any], server: ServerAdmin) -> list[Tensor]:
    """Return the server's state, all pushes included, on worker 0; an empty list on other workers."""
    await conductor.barrier()
    state = await server.save() if conductor.port.rank == 0 else []
    await conductor.barrier()
    return state


def load(conductor: Conductor[Any], saved: dict[str, Any]) -> list[Tensor]:
    """Restore a checkpoint; return the tensors to load into a server, if this worker saved them."""
    strategy, replica, port = conductor.strategy, conductor.replica, conductor.port
    settings = without_refused(type(strategy), saved["settings"])
    if (saved["strategy"], settings) != (strategy.name, strategy.settings()):
        raise SettingError(
            f"the checkpoint was made under {saved['strategy']} {saved['settings']}, "
            f"but {strategy.name} {strategy.settings()} is attached"
        )
    rank, members = replica.members.global_rank(port.rank), replica.members.count
    if saved["world"] != port.world or f"rank{rank}" not in saved:
        ranks = [key for key in saved if key.startswith("rank")]
        savers = saved["world"] * saved.get("members", 1)
        raise SettingError(
            f"the checkpoint was saved by {savers} ranks and contains {', '.join(ranks)}; "
            f"this is rank {rank} of {port.world * members}"
        )
    if saved.get("members", 1) != members:
        raise SettingError(
            f"the checkpoint was saved with {saved.get('members', 1)} ranks per replica, "
            f"and this replica has {members}"
        )
    own = torch.load(io.BytesIO(saved[f"rank{rank}"]), weights_only=True)
    with torch.no_grad():
        conductor.state = _from_plain(strategy.init(replica), own["state"])
        for tensor, value in zip(replica.buffers.all(), own["buffers"], strict=True):
            tensor.copy_(value)
        for tensor, value in zip(replica.weights, own.get("weights", ()), strict=False):
            tensor.copy_(value)
    replica.inputs.samples = own["samples"]
    if "optimizer" in own:
        states = own["optimizer"] if isinstance(own["optimizer"], list) else [own["optimizer"]]
        for optimizer, state in zip(replica.optimizer.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    replica.optimizer.forget_held_state()
    server_state = zip(own.get("served", ()), cycle(replica.weights), strict=False)
    return [value.to(weight.device) for value, weight in server_state]


async def _to_plain(value: Any) -> Any:
    """Return a strategy's state as plain data; wait for results in flight, but do not apply them."""
    if isinstance(value, Pending):
        return {_ARRIVED: await _to_plain(await value)}
    if is_dataclass(value):
        return {f.name: await _to_plain(getattr(value, f.name)) for f in fields(value) if _is_saved(f)}
    if isinstance(value, dict):
        return {key: await _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [await _to_plain(item) for item in value]
    if value is None or isinstance(value, Tensor | int | float | bool | str):
        return value
    raise OffbeatError(f"a strategy's state holds a {type(value).__name__}, which cannot be saved")


def _from_plain(like: Any, plain: Any) -> Any:
    """Invert `_to_plain`, in the shape of a fresh state."""
    if isinstance(plain, dict) and set(plain) == {_ARRIVED}:
        return Arrived(_from_plain(None, plain[_ARRIVED]))
    if is_dataclass(like):
        names = [f.name for f in fields(like) if _is_saved(f)]
        if not isinstance(plain, dict) or set(plain) != set(names):
            raise SettingError(
                f"the checkpoint holds another {type(like).__name__} than this version of Offbeat has: "
                "it was made by another version. Load the model and the optimizer alone, and start the "
                "strategy anew"
            )
        for name in names:
            setattr(like, name, _from_plain(getattr(like, name), plain[name]))
        return like
    if isinstance(plain, dict):
        return {key: _from_plain(None, item) for key, item in plain.items()}
    if isinstance(plain, list):
        fresh = like if isinstance(like, list) and len(like) == len(plain) else [None] * len(plain)
        return [_from_plain(known, item) for known, item in zip(fresh, plain, strict=True)]
    return plain


def _is_saved(part: Field[Any]) -> bool:
    """Return whether a field is saved; `metadata={"saved": False}` says that it is unused between steps."""
    return bool(part.metadata.get("saved", True))
