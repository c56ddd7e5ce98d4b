"""The local optimizer: what it steps, the user's optimizer has stepped, and the reverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from offbeat.core.optimizer import OptimizerView
from offbeat.core.replica import Replica
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.processes.sharded.model import LocalModel
from offbeat.worlds.processes.sharded.optimizer import LocalOptimizer
from tests.support.limits import HANG_S
from tests.support.sharded_runs import adam, batch, farthest, shard, uneven, whole

pytestmark = pytest.mark.processes


def _steps(kinds: str) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """Step by the user's optimizer ("u") or by the local one ("l"); return weights, moments, their kind."""
    model = shard(uneven())
    optimizer = adam(model)
    members = (0, 1) if dist.get_rank() < 2 else (2, 3)
    port = connect_group(torch.device("cpu"), {}, HANG_S, ranks=members)
    local = LocalModel(model, port)
    pair = LocalOptimizer(optimizer, local)
    replica = Replica(local.module, optimizer=pair.local)
    local.bind()
    view = OptimizerView(pair.local)
    for number, kind in enumerate(kinds):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        optimizer.zero_grad()
        model(batch(model, number, 0)[0]).square().sum().backward()
        if kind == "u":
            optimizer.step()
        else:
            local.take_gradients()
            pair.take()
            flats = [torch.zeros(block.numel) for block in replica.blocks]
            with torch.no_grad():
                for block, flat in zip(replica.blocks, flats, strict=True):
                    for param, part in zip(block.params, block.views(flat), strict=True):
                        part.copy_(param.grad)
                view.step(replica.blocks, flats, view.learning_rates)
            pair.give_back()
    moments: list[Any] = [state["exp_avg"] for state in optimizer.state.values()]
    sharded = all(isinstance(moment, DTensor) for moment in moments)
    result = whole(model), [moment.full_tensor() for moment in moments], sharded
    port.close()
    return result


def test_it_does_not_matter_which_of_the_two_steps(crew) -> None:
    theirs = crew(4).run(_steps, "uuuu")
    for kinds in ("ulul", "luul"):
        for (weights, moments, _), (others, other_moments, sharded) in zip(
            theirs, crew(4).run(_steps, kinds), strict=True
        ):
            assert sharded, "the user's optimizer must have DTensors, as if it had stepped itself"
            assert farthest(weights, others) < 1e-6
            assert farthest(moments, other_moments) < 1e-6
