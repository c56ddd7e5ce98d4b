"""Ray Train and Ray's actors, on a cluster of two nodes on this machine."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("ray")

import offbeat
from offbeat.integrations.ray import OffbeatModel, prepare_model
from tests.integrations.conformance import Outcomes, strategies
from tests.integrations.conformance import (
    test_all_ranks_train_and_end_with_one_model as test_all_ranks_train_and_end_with_one_model,
)
from tests.integrations.conformance import test_bsp_is_ddp_bit_for_bit as test_bsp_is_ddp_bit_for_bit
from tests.integrations.scripts import run
from tests.support.limits import HANG_S
from tests.support.returning import check_returned

LIMIT_S = 4 * HANG_S  # of all runs together
pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + HANG_S)]

LOOP = "ray_runs"
WAYS = strategies()


def launch(*command: str, cwd: Path) -> str:
    usage = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    return run([sys.executable, *command], cwd, LIMIT_S, **usage)


@pytest.fixture(scope="module")
def folder(outcomes: Outcomes) -> Path:
    """The folder of what all runs have come to: one cluster serves all."""
    found = outcomes["bsp"][0]["out"].parent
    assert isinstance(found, Path)
    return found


def equal(one: Any, other: Any) -> bool:
    """Return whether two states are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_worker_that_died_resumes_from_the_checkpoint_of_ray(folder: Path) -> None:
    assert (folder / "checkpoints" / "died").exists()
    whole, resumed = (
        torch.load(folder / "checkpoints" / f"{name}.pt") for name in ("never stopped", "resumed")
    )
    assert set(whole) == set(resumed) == {"shared.pt", "offbeat-0-of-2.pt", "offbeat-1-of-2.pt"}
    assert whole["shared.pt"]["epoch"] == 2
    assert equal(whole, resumed)
    states = [whole[f"offbeat-{rank}-of-2.pt"][f"rank{rank}"] for rank in range(2)]
    assert not equal(*states), "each worker has its own weights between two averages"


def test_worker_that_ray_restarts_alone_rejoins(folder: Path) -> None:
    assert (folder / "elastic" / "died").exists()
    workers = torch.load(folder / "elastic" / "elastic.pt")
    check_returned(workers)
    assert len({worker["node"] for worker in workers}) == 2


def test_example_of_ray_with_one_line_changed_trains_what_it_trains_under_ddp(folder: Path) -> None:
    ended = torch.load(folder / "own_example" / "ended.pt")
    assert ended["bsp"]["metrics"] == ended["ddp"]["metrics"] is not None
    assert ended["ddp"]["model"].keys() == {"module.weight", "module.bias"}
    assert equal(ended["bsp"]["model"], ended["ddp"]["model"])


def test_prepared_model_has_the_weights_of_worker_0_before_it_is_used(outcomes: Outcomes) -> None:
    for theirs, ours in zip(outcomes["ddp"], outcomes["bsp"], strict=True):
        assert torch.equal(theirs["begun"], ours["begun"])


# --- when the strategy is attached, and to what: one worker


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    found = model(torch.ones(2, 4)).sum()
    assert isinstance(found, Tensor)
    return found


@pytest.fixture
def model() -> Iterator[OffbeatModel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = OffbeatModel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), offbeat.BSP(), {})
    yield model
    if model._sync is not None:
        model._sync.close()
    dist.destroy_process_group()


def test_first_forward_with_gradients_attaches(model: OffbeatModel) -> None:
    loss_of(model)  # as lazy modules ask for: there is no optimizer yet
    optimizer = sgd(model)
    with torch.no_grad():
        loss_of(model)
    assert model._sync is None
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
    assert model.sync is model.sync
    assert model.sync.metrics.steps == 3


def test_model_may_be_compiled(model: OffbeatModel) -> None:
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        loss_of(compiled).backward()
        optimizer.step()
    assert model.sync.metrics.steps == 3


def test_all_optimizers_are_attached_in_the_order_of_their_parameters(model: OffbeatModel) -> None:
    second, first = sgd(model.module[1]), sgd(model.module[0])
    assert model.sync._optimizers == (first, second)


def test_optimizer_that_nobody_uses_any_more_is_not_attached(model: OffbeatModel) -> None:
    dropped = sgd(model)
    dropped.itself = dropped  # type: ignore[attr-defined]
    del dropped  # only the garbage collector frees it
    optimizer = torch.optim.Adam(model.parameters())
    assert model.sync._optimizers == (optimizer,)


def test_two_optimizers_of_the_same_parameters_are_refused(model: OffbeatModel) -> None:
    kept = [sgd(model), sgd(model)]
    with pytest.raises(offbeat.SettingError, match="belongs to two of the optimizers"):
        loss_of(model)
    del kept


def test_step_before_the_strategy_is_attached_is_refused(model: OffbeatModel) -> None:
    loss = loss_of(model)
    optimizer = sgd(model)
    loss.backward()
    with pytest.raises(offbeat.OffbeatError, match="build the optimizer before the first forward"):
        optimizer.step()
    before = copy.deepcopy(model.module)
    loss_of(model.module).backward()  # past the wrapper
    with pytest.raises(offbeat.OffbeatError, match="call what prepare_model"):
        optimizer.step()
    assert equal(dict(before.state_dict()), dict(model.module.state_dict()))


def test_sync_before_there_is_an_optimizer_is_refused(model: OffbeatModel) -> None:
    with pytest.raises(offbeat.OffbeatError, match="no optimizer steps this model yet"):
        model.sync.settle()


def test_wrong_option_is_refused_when_it_is_given() -> None:
    with pytest.raises(TypeError, match="parallel_strategy"):
        prepare_model(nn.Linear(1, 1), offbeat.BSP(), parallel_strategy="ddp")


def test_loops_may_toggle_the_attribute_of_ddp(model: OffbeatModel) -> None:
    optimizer = sgd(model)
    model.require_backward_grad_sync = False
    assert not model.sync.require_sync
    loss_of(model).backward()
    model.require_backward_grad_sync = True
    loss_of(model).backward()
    optimizer.step()
    assert model.sync.metrics.steps == 1
    with model.no_sync():
        assert not model.require_backward_grad_sync


def test_copy_has_the_weights_and_no_attachment(model: OffbeatModel) -> None:
    optimizer = sgd(model)
    loss_of(model).backward()
    optimizer.step()
    copied = copy.deepcopy(model)
    assert equal(dict(copied.state_dict()), dict(model.state_dict()))
    assert set(model.state_dict()) == {f"module.{name}" for name in model.module.state_dict()}
    assert copied._sync is None
    loss_of(copied).backward()
    with pytest.raises(offbeat.OffbeatError, match="build the optimizer before"):
        sgd(copied).step()
    loss_of(model).backward()
    optimizer.step()
    assert model.sync.metrics.steps == 2
