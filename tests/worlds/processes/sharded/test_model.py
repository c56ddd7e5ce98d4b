"""The local model: plain parameters in the memory of FSDP2's and of tensor parallel parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import offbeat
from offbeat import BSP, LocalSGD, SelSync
from offbeat.core.members import part_of
from offbeat.core.replica import Replica
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.processes.sharded.model import LocalModel
from tests.support.limits import HANG_S
from tests.support.sharded_runs import batch, farthest, mesh, place_of, sgd, shard, uneven, whole

pytestmark = pytest.mark.processes


def _bound() -> dict[str, Any]:
    model = shard(uneven())
    members = (0, 1) if dist.get_rank() < 2 else (2, 3)
    port = connect_group(torch.device("cpu"), {}, HANG_S, ranks=members)
    local = LocalModel(model, port)
    before = whole(model)
    replica = Replica(local.module)
    local.bind()
    with torch.no_grad():
        assert farthest(before, whole(model)) == 0
        for flat in replica.weights:
            flat.add_(1)
        moved = whole(model)
        output = model(torch.zeros(1, 6))  # FSDP2 sees what is written to the flat weights
        copied = copy.deepcopy(model.state_dict())
        replica.release()
        local.release()
        replica.weights[0].zero_()
        released = whole(model)
        again = model(torch.zeros(1, 6))
    shapes = {name: list(p.shape) for name, p in local.module.named_parameters()}
    port.close()
    return {
        "moved": max((a - b - 1).abs().max().item() for a, b in zip(moved, before, strict=True)),
        "seen": output.item(),
        "copied": max(
            (value.full_tensor() - a).abs().max().item()
            for value, a in zip(copied.values(), moved, strict=True)
        ),
        "released": farthest(released, moved),
        "again": again.item(),
        "shapes": shapes,
        "layout": [(b.names, b.offsets, b.numel) for b in replica.blocks],
    }


def test_flat_weights_and_fsdp_share_memory_until_released(crew) -> None:
    found = crew(4).run(_bound)
    expected = uneven()
    with torch.no_grad():
        for param in expected.parameters():
            param.add_(1)
        value = expected(torch.zeros(1, 6)).item()
    for rank in found:
        assert rank["moved"] < 1e-6
        assert rank["copied"] == rank["released"] == 0
        assert rank["seen"] == rank["again"] == pytest.approx(value)
        assert rank["layout"] == found[0]["layout"], "members must have the same blocks"
    assert found[0]["shapes"]["4.weight"] == [1, 7]
    assert found[1]["shapes"]["4.weight"] == [0, 7], "the second rank holds nothing of it"


def _fractions() -> list[float]:
    model = uneven()
    cut = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh()["shard"], [Shard(0)]))  # type: ignore[index]
    copied = nn.Parameter(distribute_tensor(model[0].bias.detach(), mesh()["shard"], [Replicate()]))  # type: ignore[index]
    model[0].weight, model[0].bias = cut, copied  # type: ignore[index]
    members = (0, 1) if dist.get_rank() < 2 else (2, 3)
    port = connect_group(torch.device("cpu"), {}, HANG_S, ranks=members)
    local = LocalModel(model, port)
    fractions = [part_of(param).fraction for param in local.module.parameters()]
    port.close()
    return fractions


def test_an_element_counts_once_however_many_members_have_it(crew) -> None:
    assert all(found == [1.0, 0.5, 0.5, 0.5, 0.5, 0.5] for found in crew(4).run(_fractions))


def _tensor_parallel_run(strategy: Any, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train a model with a layer that is cut by columns, one that is replicated, and one that is plain."""
    model = uneven()
    over = mesh()["shard"]
    for layer, placement in ((0, Shard(0)), (2, Replicate())):
        for name, value in list(model[layer].named_parameters()):  # type: ignore[index]
            setattr(model[layer], name, nn.Parameter(distribute_tensor(value.detach(), over, [placement])))  # type: ignore[index]
    optimizer = sgd(model)
    replica, _, _ = place_of(2)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, group=mesh()["replica"]) as sync:
        for number in range(steps):
            x, y = batch(model, number, replica)  # all ranks of a replica have all of its data
            optimizer.zero_grad()
            hidden: Any = distribute_tensor(x, over, [Replicate()])
            hidden = model[1](model[0](hidden))  # type: ignore[index]
            hidden = model[3](model[2](hidden.redistribute(over, [Replicate()])))  # type: ignore[index]
            ((model[4](hidden.to_local()) - y) ** 2).mean().backward()  # type: ignore[index]
            optimizer.step()
        with sync.consensus():
            published = whole(model)
        return published, whole(model)


def _plain_run(strategy: Any, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = uneven()
    optimizer = sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        for number in range(steps):
            x, y = batch(model, number, dist.get_rank())
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        with sync.consensus():
            published = whole(model)
        return published, whole(model)


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=3), SelSync(delta=0.05, window=5)], ids=str)
def test_tensor_parallel_replicas_equal_whole_ones(crew, strategy: Any) -> None:
    parallel, plain = crew(4).run(_tensor_parallel_run, strategy, 20), crew(2).run(_plain_run, strategy, 20)
    for rank, (published, own) in enumerate(parallel):
        assert farthest(published, plain[0][0]) < 5e-6
        assert farthest(own, plain[rank // 2][1]) < 5e-6
