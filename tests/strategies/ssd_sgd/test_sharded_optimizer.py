"""Owned: shares cover everything once, and stepping them one by one is stepping the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RMSprop

from offbeat.core.blocks import Layout
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.port import Lane
from offbeat.core.replica import Replica
from offbeat.strategies.ssd_sgd.sharded_optimizer import Partition, ShardedOptimizer
from tests.support.silent_peers import Alone

Make = Callable[[Any], Optimizer]


class Odd(nn.Module):
    """Shapes that do not divide: a scalar, a channels_last kernel, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(()))
        self.kernel = nn.Parameter(torch.randn(6, 5, 3, 3).contiguous(memory_format=torch.channels_last))
        self.matrix = nn.Parameter(torch.randn(37, 11))
        self.fine = nn.Parameter(torch.randn(29, 3, dtype=torch.float64))


def _replica(model: nn.Module, make: Make) -> Replica:
    replica = Replica(model, optimizer=make(model.parameters()), layout=Layout(400, 400))
    lay_out_gradients(replica)
    return replica


def _fill(plain: nn.Module, model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()


def _push(owned: ShardedOptimizer, skipped: bool = False) -> tuple[list[Tensor], bool]:
    port = Alone(owned.rank, len(owned.partitions[0].sizes))
    pushes, missing = owned.push(port, skipped)  # type: ignore[arg-type]
    assert port.lanes == [Lane.BACK] * len(owned.partitions)
    return [push.result() for push in pushes], bool(missing)


def _workers(replica: Replica, world: int) -> list[ShardedOptimizer]:
    """All owners, over one replica."""
    workers = [ShardedOptimizer(replica, Alone(rank, world)) for rank in range(world)]  # type: ignore[arg-type]
    for owned in workers:
        owned.bind(*owned.copy_out())
    return workers


def _together(workers: list[ShardedOptimizer]) -> None:
    """Write everybody's share into the replica."""
    for owned in workers:
        flats = [shares.zeros() for shares in owned.partitions]
        for flat, weight in zip(flats, owned.replica.weights, strict=True):
            flat[: weight.numel()].copy_(weight)
        owned.load_pulled(flats)
        owned.load_own()


# --- shares


@given(
    numels=st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any),
    world=st.integers(1, 9),
    evenly=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_element_has_one_owner(numels: list[int], world: int, evenly: bool) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in numels])
    replica = Replica(model, layout=Layout(256, 256))
    shares = Partition(replica.weights[0], replica.blocks, world, evenly)
    owners = {param: torch.zeros(param.numel()) for param in model}
    for worker, part in enumerate(shares.split(shares.zeros())):
        pieces = shares.shards.get(worker, [])
        for piece in pieces:
            owners[piece.param][piece.start : piece.stop] += 1
            piece.of(part).add_(1)  # lies inside of the share
            assert evenly or piece.whole
        assert part.sum() == sum(piece.stop - piece.start for piece in pieces), "no two pieces overlap"
    assert all((count == 1).all() for count in owners.values())
    assert sum(shares.sizes) >= replica.weights[0].numel()
    if evenly:
        assert len(set(shares.sizes)) == 1
        assert sum(shares.sizes) < replica.weights[0].numel() + 16 * world
    else:
        ideal, largest = replica.weights[0].numel() / world, max(numels) + 16
        assert all(size <= ideal + largest for size in shares.sizes)


# --- steps

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adamax, foreach": lambda p: Adamax(p, lr=0.01, foreach=True),
    "asgd": lambda p: ASGD(p, lr=0.01),
    "groups": lambda p: SGD([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)], momentum=0.9),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 3, 7])
def test_shares_stepped_by_their_owners_are_the_whole_stepped(make: Make, world: int) -> None:
    """Two steps before the cut: the optimizer's state is cut with the weights."""
    plain = Odd()
    model = copy.deepcopy(plain)
    optimizer, replica = make(plain.parameters()), _replica(model, make)
    assert replica.optimizer.elementwise
    for step in range(2):
        _fill(plain, model, step)
        optimizer.step()
        replica.optimizer.optimizers[0].step()
    with torch.no_grad():
        workers = _workers(replica, world)
        for step in range(2, 5):
            _fill(plain, model, step)
            rates = replica.optimizer.learning_rates
            optimizer.step()
            for owned in workers:
                sums, has_missing = _push(owned)
                assert not has_missing
                owned.step(sums, rates, has_missing)
            _together(workers)
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other, one)
                assert world > 1 or torch.equal(one, other)


def test_what_is_not_known_to_step_elementwise_keeps_its_parameters_whole() -> None:
    class Own(SGD):
        """Who knows what it does."""

    class Told(Own):
        elementwise = True

    for cls, elementwise in ((SGD, True), (Own, False), (Told, True), (Muon, False)):
        model = nn.Linear(5, 5, bias=False)
        assert _replica(model, lambda p, cls=cls: cls(p, lr=0.1)).optimizer.elementwise == elementwise  # type: ignore


def test_a_push_is_a_copy_and_brings_strays_home() -> None:
    model = Odd()
    replica = _replica(model, OPTIMIZERS["momentum"])
    with torch.no_grad():
        _fill(copy.deepcopy(model), model, 0)  # none of them lies in its block
        owned = ShardedOptimizer(replica, Alone(0, 1))  # type: ignore[arg-type]
        sums, has_missing = _push(owned)
        assert not has_missing
        arrived = [(p, s) for kind, s in zip(owned.partitions, sums, strict=True) for p in kind.shards[0]]
        for piece, share in arrived:
            assert torch.equal(piece.of(share), piece.param.grad)
        before = [share.clone() for share in sums]
        for param in model.parameters():
            param.grad.zero_()  # type: ignore[union-attr]
        assert all(map(torch.equal, sums, before))


def test_means_of_a_checkpoint_are_stepped_with_as_those_that_arrive() -> None:
    weights = []
    for from_checkpoint in (False, True):
        model = Odd()
        replica = _replica(model, OPTIMIZERS["momentum"])
        with torch.no_grad():
            (owned,) = _workers(replica, 1)
            _fill(copy.deepcopy(model), model, 0)
            means, has_missing = _push(owned)
            if from_checkpoint:
                arrived, means = means, [mean.clone() for mean in means]
                torch._foreach_zero_(arrived)
            owned.step(means, replica.optimizer.learning_rates, has_missing)
            _together([owned])
        weights.append([weight.clone() for weight in replica.weights])
    assert all(map(torch.equal, *weights))


def test_who_skips_pushes_zeros_and_nothing_moves_if_all_do() -> None:
    plain = Odd()
    replica = _replica(copy.deepcopy(plain), OPTIMIZERS["momentum"])
    with torch.no_grad():
        _fill(plain, replica.model, 0)
        (owned,) = _workers(replica, 1)
        _push(owned)  # leaves gradients and marks behind
        before = [weight.clone() for weight in replica.weights]
        sums, has_missing = _push(owned, skipped=True)
        assert has_missing
        assert not any(share.any() for share in sums)
        owned.step(sums, replica.optimizer.learning_rates, has_missing)
        _together([owned])
        assert all(map(torch.equal, before, replica.weights))
        sums, has_missing = _push(owned)
        owned.step(sums, replica.optimizer.learning_rates, has_missing)
        _together([owned])
        assert not any(map(torch.equal, before, replica.weights))
