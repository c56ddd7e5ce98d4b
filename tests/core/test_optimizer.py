"""OptimizerView: the optimizer steps what it is told, just as it would have; its state shows no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop, Rprop

import offbeat
from offbeat import BSP, OSP, SSDSGD, SSP, DiLoCo, LocalSGD
from offbeat.core.blocks import Layout
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError
from tests.support import loops
from tests.support.limits import HANG_S

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "momentum, in place": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "rprop, in place": lambda m: Rprop(m.parameters(), lr=0.01, foreach=True),
    "adam": lambda m: Adam(m.parameters(), lr=0.01),
    "adamw, foreach off": lambda m: AdamW(m.parameters(), lr=0.01, foreach=False),
    "adamw, fused": lambda m: AdamW(m.parameters(), lr=0.01, fused=True),
    "tensor lr": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.01, momentum=0.5),
    "groups": lambda m: SGD([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(m.parameters())]),
}

each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def _twins(make: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer, nn.Module, Replica]:
    torch.manual_seed(0)
    plain = loops.mlp()
    model = copy.deepcopy(plain)
    replica = Replica(model, optimizer=make(model), layout=Layout(1, 1))
    lay_out_gradients(replica)
    return plain, make(plain), model, replica


def _fill(plain: nn.Module, model: nn.Module) -> None:
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()


def _same(plain: nn.Module, model: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def _flat_grads(replica: Replica) -> list[torch.Tensor]:
    flats = []
    for block in replica.blocks:
        flat = torch.zeros(block.numel)
        for param, view in zip(block.params, block.views(flat), strict=True):
            assert param.grad is not None
            view.copy_(param.grad)
        flats.append(flat)
    return flats


@each_optimizer
def test_blocks_stepped_one_by_one_equal_one_step(make: Callable[[nn.Module], Optimizer]) -> None:
    plain, optimizer, model, replica = _twins(make)
    with torch.no_grad():
        for _ in range(3):
            _fill(plain, model)
            rates = replica.optimizer.learning_rates
            optimizer.step()
            for block, flat in zip(replica.blocks, _flat_grads(replica), strict=True):
                replica.optimizer.step([block], [flat], rates)
            assert _same(plain, model)


@each_optimizer
def test_a_prediction_is_the_step_itself_and_leaves_no_trace(make: Callable[[nn.Module], Optimizer]) -> None:
    plain, optimizer, model, replica = _twins(make)
    with torch.no_grad():
        for _ in range(3):
            _fill(plain, model)
            grads, rates = _flat_grads(replica), replica.optimizer.learning_rates
            before = [weight.clone() for weight in replica.weights]
            replica.optimizer.predict(replica.blocks, grads, rates)
            optimizer.step()
            assert _same(plain, model)
            for weight, value in zip(replica.weights, before, strict=True):
                weight.copy_(value)
            # Had the prediction left a trace, it would show now.
            replica.optimizer.step(replica.blocks, grads, rates)
            assert _same(plain, model)


def test_a_late_step_uses_the_rates_of_its_own_time_and_leaves_those_of_today() -> None:
    plain, optimizer, model, replica = _twins(OPTIMIZERS["momentum"])
    with torch.no_grad():
        _fill(plain, model)
        grads, rates = _flat_grads(replica), replica.optimizer.learning_rates
        optimizer.step()
        replica.optimizer.optimizers[0].param_groups[0]["lr"] = 0.7
        replica.optimizer.step(replica.blocks, grads, rates)
        assert _same(plain, model)
    assert replica.optimizer.learning_rates == [0.7]


@each_optimizer
def test_a_prediction_that_is_kept_is_the_step(make: Callable[[nn.Module], Optimizer]) -> None:
    plain, optimizer, model, replica = _twins(make)
    with torch.no_grad():
        for _ in range(3):
            _fill(plain, model)
            optimizer.step()
            replica.optimizer.predict(replica.blocks, _flat_grads(replica), replica.optimizer.learning_rates)
            replica.optimizer.keep_prediction()
            assert _same(plain, model)
        replica.optimizer.forget_prediction()
        replica.optimizer.keep_prediction()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[one], replica.optimizer.state_of(other))


def test_a_late_step_has_the_momentum_of_its_own_time() -> None:
    plain, optimizer, model, replica = _twins(OPTIMIZERS["momentum"])
    (group,) = replica.optimizer.groups
    with torch.no_grad():
        for momentum in (0.9, 0.5, 0.1):
            optimizer.param_groups[0]["momentum"] = group["momentum"] = momentum
            _fill(plain, model)
            grads, rates = _flat_grads(replica), replica.optimizer.learning_rates
            optimizer.step()
            replica.optimizer.remember_settings()
            group["momentum"] = 0.7  # by a schedule, before the late step is made
            replica.optimizer.step(replica.blocks, grads, rates)
            assert _same(plain, model)
            assert group["momentum"] == 0.7


def test_a_setting_that_a_server_would_not_learn_of_is_refused() -> None:
    _, _, _, replica = _twins(OPTIMIZERS["momentum"])
    (group,) = replica.optimizer.groups
    group["lr"], group["initial_lr"] = 0.7, 0.1
    replica.optimizer.check_settings("ssp")
    group["momentum"] = 0.3
    with pytest.raises(OffbeatError, match=r"momentum is 0.3 now, .* under ssp the server steps"):
        replica.optimizer.check_settings("ssp")


def test_only_what_the_loop_asked_for_runs_the_users_hooks() -> None:
    _, _, model, replica = _twins(OPTIMIZERS["sgd"])
    calls = []
    replica.optimizer.optimizers[0].register_step_post_hook(lambda *_: calls.append(1))
    _fill(copy.deepcopy(model), model)
    with torch.no_grad():
        replica.optimizer.step(replica.blocks, _flat_grads(replica), replica.optimizer.learning_rates)
    assert not calls
    replica.optimizer.optimizers[0].step()
    assert calls == [1]


def test_update_of_some_blocks_hides_the_others_gradients_until_the_moment_has_come() -> None:
    plain, _, model, replica = _twins(OPTIMIZERS["sgd"])
    _fill(plain, model)
    first, rest = replica.blocks[0], replica.blocks[1:]
    grads = {param: param.grad for block in replica.blocks for param in block.params}
    kept = [weight.clone() for weight in (block.weight for block in rest)]
    moment = replica.update([first])
    assert all(param.grad is None for block in rest for param in block.params)
    assert all(param.grad is grads[param] for param in first.params)
    replica.optimizer.optimizers[0].step()
    moment.fire(True)  # type: ignore[attr-defined]
    assert all(param.grad is grad for param, grad in grads.items())
    assert all(torch.equal(block.weight, value) for block, value in zip(rest, kept, strict=True))


def test_a_gradient_of_the_next_step_is_not_replaced_by_the_one_that_was_hidden() -> None:
    """The optimizer was skipped: the moment is over only once the next backward has ended."""
    _, _, model, replica = _twins(OPTIMIZERS["sgd"])
    _fill(copy.deepcopy(model), model)
    param, other = replica.blocks[1].params[0], replica.blocks[2].params[0]
    hidden = other.grad
    moment = replica.update([replica.blocks[0]])
    param.grad = newer = torch.ones_like(param)
    moment.fire(False)  # type: ignore[attr-defined]
    assert param.grad is newer
    assert other.grad is hidden


def test_parameters_without_a_gradient_are_left_alone() -> None:
    """Weight decay and momentum would move them."""
    _, _, model, replica = _twins(OPTIMIZERS["momentum"])
    _fill(copy.deepcopy(model), model)
    idle = replica.blocks[1].params[0]
    before = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        grads = _flat_grads(replica)
        replica.optimizer.step(replica.blocks, grads, replica.optimizer.learning_rates, {idle})
        replica.optimizer.step(replica.blocks, grads, replica.optimizer.learning_rates, {idle})
    moved = [not torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)]
    assert [param is not idle for param in model.parameters()] == moved
    assert idle.grad is not None


# --- a state that the loop replaces in the middle of training


def _going_back(strategy: Any, clears: bool, resumes: bool = False) -> str:
    """Replace or clear the optimizer's state after four of six steps; all ranks see the same data."""
    plain, ours = loops.mlp(), loops.mlp()
    optimizers = loops.momentum(plain), loops.momentum(ours)

    def run(model: nn.Module, optimizer: Optimizer, sync: Any = None) -> None:
        saved: Any = None
        for number, batch in enumerate(loops.batches(0, 6)):
            if number == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if number == 4 and clears:
                optimizer.state.clear()
            elif number == 4:
                state = sync.state_dict() if sync and resumes else None
                optimizer.load_state_dict(optimizer.state_dict() if resumes else saved)
                if state:
                    sync.load_state_dict(state)
            loops.train(model, optimizer, [batch])

    run(plain, optimizers[0])
    try:
        with offbeat.attach(ours, optimizers[1], strategy, timeout_s=HANG_S) as sync:
            run(ours, optimizers[1], sync)
    except OffbeatError as told:
        return str(told)
    torch.testing.assert_close(loops.tensors(ours), loops.tensors(plain))
    return "right"


_OSP, _SSD = OSP(budget=0.5, growth=0), SSDSGD(warmup=1, delay=2)
_GRADIENT = SSP(staleness=0, push="gradient")
_OWN = [BSP(), LocalSGD(period=2), DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0), SSP(staleness=0)]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [*_OWN, _OSP, _SSD, _GRADIENT], ids=str)
def test_a_state_that_the_loop_replaces_is_used_or_refused(crew, strategy: Any) -> None:
    for clears in (False,) if strategy is _GRADIENT else (False, True):  # where the server has all state
        for told in crew(2).run(_going_back, strategy, clears):
            assert told == "right" if strategy in _OWN else "replaced or cleared the state of SGD" in told


@pytest.mark.processes
@pytest.mark.parametrize("strategy", [_OSP, _SSD, _GRADIENT], ids=str)
def test_a_checkpoint_may_replace_the_state(crew, strategy: Any) -> None:
    for told in crew(2).run(_going_back, strategy, False, True):
        assert told == "right"
