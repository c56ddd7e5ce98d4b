"""Parcels: what an owner packs is what another worker finds in its place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.core.blocks import Layout
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.partition import EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.parcels import ParcelState, ShardedParcels
from offbeat.strategies.ssd_sgd.sharded_optimizer import ShardedOptimizer
from tests.support.silent_peers import Alone


class Noting(Alone):
    """A port that keeps the slices to gather."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.slices: list[Sequence[Tensor]] = []

    def all_gather(self, slices, lane):  # type: ignore[no-untyped-def]
        self.slices.append(slices)
        return super().all_gather(slices, lane)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_piece_arrives_where_it_belongs(parts: int, world: int) -> None:
    """A scalar, a channels_last kernel and two dtypes; one parameter has no state at its owner."""
    torch.manual_seed(0)
    kernel = torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last)
    shapes = [torch.randn(()), kernel, torch.randn(37, 11), torch.randn(29, 3, dtype=torch.float64)]
    model = nn.ParameterList([nn.Parameter(each) for each in shapes])
    optimizer = AdamW(model.parameters())
    replica = Replica(model, optimizer=optimizer, layout=Layout(400, 400))
    lay_out_gradients(replica)
    unstepped = model[2]
    for param in model:
        param.grad = torch.randn_like(param) if param is not unstepped else None
    optimizer.step()
    seen = dict.fromkeys(model, 0)
    with torch.no_grad():
        workers = []
        for rank in range(world):
            port, state = Noting(rank, world), ParcelState()
            owner = ShardedOptimizer(replica, port, parts)  # type: ignore[arg-type]
            owner.bind(*owner.copy_out())
            workers.append((port, owner, ShardedParcels(state, replica, owner)))
        for part in [EvenSlice(number, parts) for number in range(parts)]:
            for port, _, parcels in workers:
                parcels.pull(port, part, None)  # type: ignore[arg-type]
            for (port, *_), (other, *_) in permutations(workers, 2):
                for slices, sent in zip(port.slices, other.slices, strict=True):
                    slices[other.rank].copy_(sent[other.rank])
                    assert len({each.nbytes for each in slices}) == 1
            for port, _, parcels in workers:
                port.slices.clear()
                for piece in parcels.arrived(part):
                    shard, state_here = piece.shard, optimizer.state[piece.shard.param]
                    seen[shard.param] += shard.stop - shard.start
                    assert torch.equal(piece.weight, shard.cut(shard.param.data))
                    assert bool(piece.marks[0]) == (shard.param is not unstepped)
                    for name, value in piece.state.items() if state_here else ():
                        assert torch.equal(value, shard.cut(state_here[name]))
                    assert not state_here or all(float(number) == 1 for number in piece.numbers)
    assert seen == {param: (world - 1) * param.numel() for param in model}


class Counting(TorchDispatchMode):
    """Counts what torch is asked to do, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operations(world: int, rank: int) -> int:
    """How many operations a worker needs to make its layouts, to push and to pull each part once."""
    model = nn.ParameterList([nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(3))])
    replica = Replica(model, optimizer=AdamW(model.parameters()), layout=Layout(400, 400))
    lay_out_gradients(replica)
    port: Any = Alone(rank, world)
    with torch.no_grad(), Counting() as counting:
        owner = ShardedOptimizer(replica, port, 2)
        owner.bind(*owner.copy_out())
        parcels = ShardedParcels(ParcelState(), replica, owner)
        owner.push(port, skipped=False)
        for part in owner.parts:
            parcels.keep(part)
            parcels.pull(port, part, None)
        for pull in owner.pull(port, [partition.zeros() for partition in owner.partitions]):
            pull.result()
    assert len(port.lanes) > 2
    return counting.count


@pytest.mark.parametrize("rank", [0, 50])
def test_more_workers_are_no_more_operations(rank: int) -> None:
    """Of 60 workers most own no element of a small model, and of 600 more do."""
    assert _operations(600, rank) == _operations(60, rank) > 0
