"""Groups of ranks: which ranks exchange with each other, and which train one replica together.

    attach(model, optimizer, strategy)                     every rank is a worker
    attach(…, group=replicas)                              sharded model: the model's DTensors say which ranks
                                                           hold the other parts of this rank's replica
    attach(…, group=replicas, inner=host)                  whole model on every rank: the ranks of `inner`
                                                           average their gradients at every step, as BSP does

`group` always names the ranks with which this rank exchanges: one of each replica. So a rank's traffic, its
errors and its checkpoint concern that group alone, whether or not the model is sharded, and a strategy sees
as many workers as there are replicas.

Why `inner` is a group and not a strategy: between the ranks of one host nothing is to be gained by waiting
less, and every strategy between hosts needs one gradient per host, complete before it looks. A second
strategy inside would raise questions that have no good answer (what does SelSync's norm mean if replicas
inside a host differ?). Two levels with BSP inside answer them all: a host is one worker with a larger batch.
Why not DistributedDataParallel inside: it reduces into buckets of its own, which would have to be copied.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError

HOW_TO_GROUP = (
    "name the ranks that hold the same part in other replicas: with mesh = init_device_mesh(device, "
    '(replicas, shards), mesh_dim_names=("replica", "shard")) and fully_shard(model, mesh=mesh["shard"]), '
    'write offbeat.attach(model, optimizer, strategy, group=mesh["replica"])'
)


@dataclass(frozen=True)
class Groups:
    """Global ranks with which this rank exchanges, and those with which it trains one replica."""

    replicas: tuple[int, ...] = ()  # one of each replica; empty: all ranks
    members: tuple[int, ...] = ()  # of this rank's replica; empty: this rank alone
    sharded: bool = False  # the members hold parts of the model, not copies

    @classmethod
    def of(cls, model: nn.Module, strategy: Strategy[Any], group: Any = None, inner: Any = None) -> Groups:
        """Find the groups of this rank; refuse groups that cannot be meant."""
        sharded = sharded_parameters(model)
        if group is None and inner is None and not sharded:
            return cls()
        if group is None:
            what = "inner= names the ranks of one replica, but group= is missing"
            if sharded:
                what = (
                    f"parameter {next(iter(sharded))} is a DTensor, sharded over ranks, but group= is missing"
                )
            raise SettingError(f"{what}: {HOW_TO_GROUP}")
        replicas = ranks_of(group, "group")
        if sharded:
            if inner is not None:
                raise SettingError("inner= is for models that are not sharded: leave it out")
            return cls(replicas, _shard_ranks(sharded, replicas), True)
        if inner is None:
            return cls(replicas)
        return cls(replicas, _inner_ranks(ranks_of(inner, "inner"), replicas, strategy))

    @property
    def description(self) -> dict[str, str]:
        """The size of this rank's replica and its place in it, the same on all ranks of `replicas`."""
        if not self.members:
            return {}
        place = self.members.index(dist.get_rank())
        return {"place in its replica": f"rank {place} of {len(self.members)}"}


def ranks_of(group: Any, name: str) -> tuple[int, ...]:
    """Return the global ranks of a process group or of a device mesh of one dimension."""
    if not dist.is_initialized():
        raise SettingError(f"{name}= needs torch.distributed.init_process_group() before offbeat.attach()")
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh
        if group.ndim != 1:
            names = group.mesh_dim_names or [str(dim) for dim in range(group.ndim)]
            raise SettingError(
                f"{name}= is a mesh of {group.ndim} dimensions ({', '.join(names)}): choose the dimension of "
                f'the replicas, such as {name}=mesh["{names[0]}"]'
            )
        ranks = tuple(int(rank) for rank in group.mesh.tolist())
    elif isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
    elif group == dist.GroupMember.NON_GROUP_MEMBER:
        raise SettingError(
            f"{name}= is a group that rank {dist.get_rank()} is not part of: give each rank its own group"
        )
    else:
        raise SettingError(
            f"{name}= must be a torch.distributed ProcessGroup or a DeviceMesh of one dimension, "
            f"not {type(group).__name__}"
        )
    if dist.get_rank() not in ranks:
        raise SettingError(
            f"{name}= holds ranks {_named(ranks)}, and rank {dist.get_rank()} is not one of them: "
            "give each rank its own group"
        )
    return ranks


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """Return the parameters that are DTensors, by name; a model without them never imports their module."""
    reshard(model)
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return {}
    return {name: p for name, p in model.named_parameters() if isinstance(p, tensors.DTensor)}


def reshard(model: nn.Module) -> None:
    """Make FSDP2's modules drop gathered parameters: they do not see what is written to the local parts."""
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that `fully_shard` was applied to."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None:
        yield from (module for module in model.modules() if isinstance(module, kind))


def _shard_ranks(sharded: dict[str, Any], replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of this replica: those of the largest mesh, which must contain all others."""
    own = dist.get_rank()
    meshes = {name: frozenset(int(r) for r in p.device_mesh.mesh.flatten()) for name, p in sharded.items()}
    name, members = max(meshes.items(), key=lambda item: len(item[1]))
    for other, ranks in meshes.items():
        if not ranks <= members:
            raise SettingError(
                f"parameter {name} lies on ranks {_named(members)} and parameter {other} on ranks "
                f"{_named(ranks)}: one replica must have all its parameters on one mesh, or on parts of it"
            )
    shared = members & set(replicas) - {own}
    if shared:
        raise SettingError(
            f"group= holds ranks {_named(replicas)}, but ranks {_named({own, *shared})} hold parameter "
            f"{name} together: they are parts of one replica. Instead, {HOW_TO_GROUP}"
        )
    return tuple(sorted(members))


def _inner_ranks(
    inner: tuple[int, ...], replicas: tuple[int, ...], strategy: Strategy[Any]
) -> tuple[int, ...]:
    shared = set(inner) & set(replicas) - {dist.get_rank()}
    if shared:
        raise SettingError(
            f"group= and inner= share rank {_named(shared)}: `inner` are the ranks that train one replica "
            "together, `group` one rank of each replica"
        )
    if strategy.server_half() is not None:
        raise SettingError(
            f"{strategy.name} has a server, which admits each rank at its own time: the ranks of inner= "
            "would hold different weights. Use a strategy without a server, or shard the model over these "
            "ranks with torch.distributed.fsdp.fully_shard"
        )
    return inner


def _named(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks)))
