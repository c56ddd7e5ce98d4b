"""Groups that cannot be meant are refused, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import offbeat
from offbeat import BSP, SSP, LocalSGD
from offbeat.errors import OffbeatError
from offbeat.worlds.processes.groups import Groups
from tests.conformance.table import AnyStrategy
from tests.support.limits import HANG_S
from tests.support.sharded_runs import mesh, sgd, shard, uneven

pytestmark = pytest.mark.processes


def _error(model: nn.Module, strategy: AnyStrategy | None = None, **groups: Any) -> str:
    """Return the text of the refusal on this rank."""
    try:
        offbeat.attach(model, sgd(model), strategy or LocalSGD(), timeout_s=HANG_S, **groups)
    except OffbeatError as error:
        return str(error)
    return "not refused"


def _refusals() -> dict[str, str]:
    """Return the text of each refusal. All are made before anything is exchanged."""
    replicas, shards = mesh()["replica"], mesh()["shard"]
    rank = dist.get_rank()
    of_two = dist.new_group([0, 1])
    sharded = shard(uneven())
    return {
        "no group": _error(sharded),
        "shard dimension": _error(sharded, group=shards),
        "two dimensions": _error(sharded, group=mesh()),
        "sharded and inner": _error(sharded, group=replicas, inner=shards),
        "not a group": _error(uneven(), group=[0, 1]),
        "inner alone": _error(uneven(), inner=shards),
        "inner twice": _error(uneven(), group=shards, inner=shards),
        "inner and server": _error(uneven(), SSP(), group=replicas, inner=shards),
        "served": _error(sharded, SSP(), group=replicas, server="127.0.0.1:1"),
        "hsdp": _error(shard(uneven(), mesh()), group=replicas),
        "elsewhere": _error(uneven(), group=of_two) if rank > 1 else "",
    }


EXPECTED = {
    "no group": "parameter 0.weight is a DTensor, sharded over ranks, but group= is missing: name the ranks",
    "shard dimension": "hold parameter 0.weight together: they are parts of one replica. Instead, name the",
    "two dimensions": "a mesh of 2 dimensions (replica, shard): choose the dimension of the replicas, such "
    'as group=mesh["replica"]',
    "sharded and inner": "inner= is for models that are not sharded: leave it out",
    "not a group": "must be a torch.distributed ProcessGroup or a DeviceMesh of one dimension, not list",
    "inner alone": "inner= names the ranks of one replica, but group= is missing",
    "inner twice": "group= and inner= share rank",
    "inner and server": "ssp has a server, which admits each rank at its own time",
    "served": "a server of `offbeat serve` holds one model",
    "hsdp": "hold parameter 0.weight together",
}


def test_wrong_groups_are_refused(crew) -> None:
    texts = crew(4).run(_refusals)
    for rank, found in enumerate(texts):
        for name, expected in EXPECTED.items():
            assert expected in found[name], (rank, name, found[name])
    for rank in (2, 3):
        assert f"group= is a group that rank {rank} is not part of" in texts[rank]["elsewhere"]


def _partial(model: nn.Module) -> nn.Module:
    weight: Any = model[0].weight  # type: ignore[index]
    local = DTensor.from_local(weight.detach(), mesh()["shard"], [Partial()], run_check=False)
    model[0].weight = nn.Parameter(local)  # type: ignore[index]
    return model


def _flat() -> nn.Module:
    """Return a model with a module of the first FSDP, which cannot be built without an accelerator."""
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped._modules["_fsdp_wrapped_module"] = uneven()
    wrapped.training_state = None  # type: ignore[assignment]
    return nn.Sequential(wrapped)


def _unmovable() -> dict[str, str]:
    replicas = mesh()["replica"]
    with torch.device("meta"):
        empty = shard(uneven())
    offloaded = shard(uneven(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return {
        "partial": _error(_partial(uneven()), group=replicas),
        "meta": _error(empty, group=replicas),
        "offload": _error(offloaded, group=replicas),
        "fsdp1": _error(_flat(), group=replicas),
    }


def test_parameters_that_cannot_travel_are_refused(crew) -> None:
    for found in crew(4).run(_unmovable):
        assert "parameter 0.weight has a Partial placement" in found["partial"]
        assert "on the meta device and has no values" in found["meta"]
        assert "is offloaded to the CPU" in found["offload"]
        assert "FullyShardedDataParallel" in found["fsdp1"]
        assert "fully_shard" in found["fsdp1"]


def _crossed() -> str:
    """Group the first rank of one replica with the second of the other."""
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    model = shard(uneven())
    return _error(model, BSP(), group=groups[dist.get_rank() in (1, 2)])


def test_ranks_with_different_parts_are_refused(crew) -> None:
    crew = crew(4)
    texts = crew.run(_crossed)
    assert all("does not train what rank" in text for text in texts), texts
    assert "rank 3 does not train what rank 0 trains" in texts[0]


def _found(build: Callable[[], nn.Module], **named: str) -> Groups:
    groups = {name: mesh()[dimension] for name, dimension in named.items()}
    return Groups.of(build(), BSP(), **groups)


def _tensor_parallel() -> nn.Module:
    model = uneven()
    for param_name in ("weight", "bias"):
        whole = getattr(model[0], param_name)
        parts = distribute_tensor(whole.detach(), mesh()["shard"])
        setattr(model[0], param_name, nn.Parameter(parts))
    return model


def test_each_rank_finds_its_groups(crew) -> None:
    for build, named, sharded in (
        (_tensor_parallel, {"group": "replica"}, True),
        (uneven, {"group": "replica", "inner": "shard"}, False),
    ):
        found = crew(4).run(_apply, _found, build, named)
        assert [g.replicas for g in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
        assert [g.members for g in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
        assert all(g.sharded == sharded for g in found)


def _apply(function: Callable[..., Any], build: Any, named: dict[str, str]) -> Any:
    return function(build, **named)
