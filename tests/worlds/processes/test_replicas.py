"""Connections of a group: ranks outside take no part, and errors name ranks as people know them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat import BSP, LocalSGD, RankLost
from offbeat.core.port import Lane
from offbeat.worlds.processes.failure import ExitCount
from offbeat.worlds.processes.rendezvous import connect_group, new_named_group
from tests.support.beside import beside
from tests.support.limits import HANG_S
from tests.support.sharded_runs import sgd, uneven

pytestmark = pytest.mark.processes


def _two_of_four() -> list[float]:
    """Train on ranks 1 and 3 only, each from another start; the others do not even attach."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, LocalSGD(period=2), timeout_s=HANG_S, group=group) as sync:
        for number in range(4):
            optimizer.zero_grad()
            (model(torch.full((1, 2), float(dist.get_rank() + number)))).sum().backward()
            optimizer.step()
        saved = sync.state_dict()
        assert f"rank{dist.get_rank()}" in saved, "keys of all groups must differ in one checkpoint"
        return [*model.weight.detach().flatten().tolist(), sync.port.rank, sync.port.world]


def test_a_group_trains_without_the_other_ranks(crew) -> None:
    found = crew(4).run(_two_of_four)
    assert found[0] == found[2] == []
    assert found[1][:2] == found[3][:2]
    assert (found[1][2:], found[3][2:]) == ([0, 2], [1, 2])


def _operations() -> list[Any]:
    """Run each operation of a port between the ranks of a group, with different numbers of groups before."""
    if dist.get_rank() % 2:
        new_named_group(f"alone{dist.get_rank()}", (dist.get_rank(),), timedelta(seconds=HANG_S))
    ranks = (0, 3) if dist.get_rank() in (0, 3) else (1, 2)
    port = connect_group(torch.device("cpu"), {}, HANG_S, ranks=ranks)
    number = float(dist.get_rank())
    values = []
    for lane in Lane:
        mean, root = torch.tensor([number]), torch.tensor([number])
        slices = [torch.tensor([10 * number + k]) for k in range(2)]
        gathered = [torch.tensor([number if k == port.rank else -1.0]) for k in range(2)]
        for pending in (
            port.all_reduce(mean, lane=lane),
            port.broadcast(root, 1, lane),
            port.reduce_scatter(slices, lane=lane),
            port.all_gather(gathered, lane),
        ):
            pending.wait()
            pending.result()
        values.append([mean.item(), root.item(), slices[port.rank].item(), *map(float, gathered)])
    port.close()
    return values


def test_operations_stay_within_the_group_however_many_groups_a_rank_has(crew) -> None:
    found = crew(4).run(_operations)
    for rank, (first, second) in enumerate(found):
        ranks = (0, 3) if rank in (0, 3) else (1, 2)
        mean = sum(ranks) / 2
        own = 10 * mean + ranks.index(rank)
        assert first == second == [mean, float(ranks[1]), own, *map(float, ranks)]


def _one_dies() -> str:
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    model = uneven()
    try:
        with offbeat.attach(model, sgd(model), BSP(), timeout_s=HANG_S, group=group):
            for number in range(3):
                if dist.get_rank() == 3 and number == 2:
                    raise ValueError("out of coffee")
                model(torch.ones(1, 6)).sum().backward()
    except (RankLost, ValueError) as error:
        return str(error)
    return ""


def test_errors_name_global_ranks_of_the_own_group(crew) -> None:
    four = crew(4)
    found = four.run(_one_dies)
    four.dismiss()
    assert found[0] == found[2] == "", "the other group goes on"
    assert "rank 3 failed: ValueError: out of coffee" in found[1]
    assert "(seen by rank 1)" in found[1]


def test_the_rank_that_may_hold_the_store_goes_last() -> None:
    store = dist.HashStore()
    first, second = ExitCount(store, True), ExitCount(store, False)
    first.count()
    waiting = beside(first.wait, HANG_S)
    second.wait(HANG_S)  # does not hold the store
    assert not waiting.done()
    second.count()
    waiting.result(HANG_S)
    ExitCount(store, False)
    first.wait(0.0)  # gives up when its patience is over
