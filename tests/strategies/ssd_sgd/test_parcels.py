"""Parcels: what an owner packs is what another worker finds in its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from offbeat.core.blocks import Layout
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.partition import EvenSlice
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.parcels import ParcelState, ShardedParcels
from offbeat.strategies.ssd_sgd.sharded_optimizer import ShardedOptimizer
from tests.support.silent_peers import Alone

WORLD = 2


class Noting(Alone):
    """A port that keeps the slices to gather."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, WORLD)
        self.slices: list[list[Tensor]] = []

    def all_gather(self, slices, lane):  # type: ignore[no-untyped-def]
        self.slices.append(slices)
        return super().all_gather(slices, lane)


@pytest.mark.parametrize("parts", [1, 3])
def test_every_piece_arrives_where_it_belongs(parts: int) -> None:
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
        for rank in range(WORLD):
            port, state = Noting(rank), ParcelState()
            owner = ShardedOptimizer(replica, port, parts)  # type: ignore[arg-type]
            owner.bind(*owner.copy_out())
            workers.append((port, owner, ShardedParcels(state, replica, owner)))
        for part in [EvenSlice(number, parts) for number in range(parts)]:
            for port, _, parcels in workers:
                parcels.pull(port, part, None)  # type: ignore[arg-type]
            for (port, *_), (other, *_) in (workers, workers[::-1]):
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
    assert seen == {param: param.numel() for param in model}
