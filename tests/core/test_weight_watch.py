"""Weights that the loop changes by itself: right, or refused where the strategy would lose the change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import OSP, SSDSGD, SSP, LocalSGD, OffbeatError
from offbeat.core.blocks import Layout
from offbeat.core.replica import Replica
from offbeat.core.weight_watch import EVERY, FIRST, WeightWatch
from tests.support import loops
from tests.support.limits import HANG_S

UNSEEN = FIRST + 1  # a step in which no bits are added up


@pytest.fixture
def model() -> nn.Module:
    return loops.mlp()


def _clamp(model: Any) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.1, 0.1)


def _one_bit(model: Any) -> None:
    model[2].bias.data[3] += 1e-6


def _load(model: Any) -> None:
    model.load_state_dict(loops.mlp(seed=1).state_dict())


def _assign(model: Any) -> None:
    model[2].weight.data = model[2].weight.data * 2


def _swap(model: Any) -> None:
    """Evaluate other weights, and put the own back."""
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(loops.mlp(seed=1).state_dict())
    model.load_state_dict(own)


def _watch(model: nn.Module, keeps: bool = False) -> WeightWatch:
    return WeightWatch(Replica(model), "ssp", Layout.default(model, keeps_edits=keeps))


@pytest.mark.parametrize(
    ("step", "change"),
    [
        *((1, change) for change in (_clamp, _one_bit, _load, _assign)),
        *((5 * EVERY, change) for change in (_clamp, _one_bit)),
        (UNSEEN, _load),
    ],
)
def test_changes_are_found(model: nn.Module, step: int, change: Callable[[Any], None]) -> None:
    watch = _watch(model)
    watch.note(step)
    watch.check()
    change(model)
    with pytest.raises(OffbeatError, match=r"changed weights by itself, .* ssp keeps the weights elsewhere"):
        watch.check()


@pytest.mark.parametrize("step", [1, UNSEEN])
def test_weights_that_were_put_back_have_not_changed(model: nn.Module, step: int) -> None:
    watch = _watch(model)
    watch.note(step)
    _swap(model)
    watch.check()


def test_where_changes_count_nothing_is_looked_at(model: nn.Module) -> None:
    watch = _watch(model, keeps=True)
    watch.note(1)
    _clamp(model)
    watch.check()


# --- through attach


def _train(strategy: Any, change: Callable[[Any], None], when: int) -> str:
    """Change the weights after `when` steps, alike on all ranks, which see the same data as a plain loop."""
    plain, ours = loops.mlp(), loops.mlp()
    optimizers = loops.sgd(plain), loops.sgd(ours)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, batch in enumerate(loops.batches(0, 4)):
            if number == when:
                change(model)
            loops.train(model, optimizer, [batch])

    run(plain, optimizers[0])
    try:
        with offbeat.attach(ours, optimizers[1], strategy, timeout_s=HANG_S):
            run(ours, optimizers[1])
    except OffbeatError as told:
        return str(told)
    torch.testing.assert_close(loops.tensors(ours), loops.tensors(plain))
    return "right"


def _train_with_hook(strategy: Any, before: bool) -> str:
    """Bound the weights in a hook after each step, which is registered before attach or after it."""
    plain, ours = loops.mlp(), loops.mlp()
    optimizers = loops.sgd(plain), loops.sgd(ours)

    def add_hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *_: _clamp(model))

    add_hook(plain, optimizers[0])
    loops.train(plain, optimizers[0], loops.batches(0, 4))
    if before:
        add_hook(ours, optimizers[1])
    try:
        with offbeat.attach(ours, optimizers[1], strategy, timeout_s=HANG_S):
            if not before:
                add_hook(ours, optimizers[1])
            loops.train(ours, optimizers[1], loops.batches(0, 4))
    except OffbeatError as told:
        return str(told)
    torch.testing.assert_close(loops.tensors(ours), loops.tensors(plain))
    return "right"


each_strategy = pytest.mark.parametrize(
    ("strategy", "at_first", "later"),
    [
        (LocalSGD(period=2), True, True),
        (OSP(budget=0.5, growth=0), True, False),
        (SSDSGD(warmup=0, delay=2), True, False),
        (SSP(staleness=0, push="update"), False, True),
        (SSP(staleness=1, push="gradient"), False, False),
    ],
    ids=lambda value: value.name if isinstance(value, offbeat.Strategy) else "",
)


@pytest.mark.processes
@each_strategy
def test_a_change_in_a_hook_is_right_or_refused(crew, strategy: Any, at_first: bool, later: bool) -> None:
    for before in (True, False):
        for told in crew(2).run(_train_with_hook, strategy, before):
            assert told == "right" if later else "changed weights by itself" in told


@pytest.mark.processes
@each_strategy
def test_a_change_is_right_or_refused(crew, strategy: Any, at_first: bool, later: bool) -> None:
    for when, right in ((0, at_first), (3, later)):
        for told in crew(2).run(_train, strategy, _clamp, when):
            assert told == "right" if right else "changed weights by itself" in told
