"""What users are told when the ranks, the model or the strategy do not fit: the error, and what it names."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import offbeat
from offbeat import BSP, LocalSGD
from offbeat.core.validation import check_attachable, unwrap
from offbeat.worlds.processes.rendezvous import check_fingerprints
from tests.support import loops
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

BOTH = pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2)], ids=str)


def told(crew: Crew, function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """The error and its message on every rank; all must have one."""
    crew.start(function, *args)
    outcomes = crew.outcomes()
    if any(not well and value[0] == "Gone" for well, value in outcomes):
        crew.dismiss()
    assert not any(well for well, _ in outcomes), outcomes
    return [(name, message) for _, (name, message, _) in outcomes]


def expect(
    crew: Crew, error: type[Exception], words: list[str], function: Callable[..., Any], *args: Any
) -> None:
    for name, message in told(crew, function, *args):
        assert name == error.__name__, message
        for word in words:
            assert word in message


# --- ranks that do not belong together


def _linear(rank: int) -> nn.Module:
    return nn.Linear(4, 3)


def _by_name(rank: int) -> nn.Module:
    return nn.ModuleDict({"left" if rank else "right": nn.Linear(4, 3)})


def _by_shape(rank: int) -> nn.Module:
    return nn.Linear(4, 3 + rank)


def _by_dtype(rank: int) -> nn.Module:
    return nn.Linear(4, 3, dtype=torch.float64 if rank else torch.float32)


def _by_frozen(rank: int) -> nn.Module:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(rank == 0)
    return model


def _by_buffer(rank: int) -> nn.Module:
    return nn.BatchNorm1d(4, track_running_stats=rank == 0)


def _with_statistics(rank: int) -> nn.Module:
    return nn.BatchNorm1d(4)


def _by_order(rank: int) -> nn.Module:
    parts = {"left": nn.Linear(4, 3), "right": nn.Linear(3, 4)}
    return nn.ModuleDict(dict(sorted(parts.items(), reverse=rank == 1)))


def _by_memory_format(rank: int) -> nn.Module:
    return nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format)


def _attach(
    make: Callable[[int], nn.Module], strategies: list[Any], buffers: list[str] | None = None
) -> None:
    rank = dist.get_rank()
    model = make(rank)
    policy = buffers[rank] if buffers else "average"
    offbeat.attach(model, loops.sgd(model), strategies[rank], buffers=policy, timeout_s=HANG_S).close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_by_name, ["parameter right.weight is absent", "rank 1"]),
        (_by_shape, ["parameter weight is torch.float32 [4, 4]", "torch.float32 [3, 4]", "on rank 0"]),
        (_by_dtype, ["parameter weight is torch.float64", "torch.float32 [3, 4]", "on rank 0"]),
        (_by_frozen, ["parameter bias", "frozen", "rank 1"]),
        (_by_buffer, ["buffer running_mean is absent", "rank 1"]),
        (_by_order, ["parameter left.weight", "rank 1"]),
        (_by_memory_format, ["parameter weight", "rank 1"]),
    ],
)
def test_models_that_differ(crew, make: Callable[[int], nn.Module], words: list[str]) -> None:
    expect(crew(2), offbeat.MismatchError, words, _attach, make, [BSP(), BSP()])


@pytest.mark.parametrize("other", [BSP(), LocalSGD(period=5)])
def test_strategies_that_differ(crew, other: Any) -> None:
    words = [str(other), "LocalSGD(codec=None, period=4", "rank 1", "strategy"]
    expect(crew(2), offbeat.MismatchError, words, _attach, _linear, [LocalSGD(period=4), other])


def test_policies_for_buffers_that_differ(crew) -> None:
    args = (_attach, _with_statistics, [BSP(), BSP()], ["average", "local"])
    expect(crew(2), offbeat.MismatchError, ["buffers", "local", "average"], *args)


def test_a_rank_that_never_attaches() -> None:
    with pytest.raises(offbeat.RankLost, match=r"rank 1 did not call offbeat.attach\(\) within"):
        check_fingerprints(dist.HashStore(), 0, 2, {"strategy": "BSP()"}, timeout_s=0.1)


# --- what cannot be attached


def _strangers() -> None:
    offbeat.attach(nn.Linear(4, 3), loops.sgd(nn.Linear(7, 2)), BSP())


def _wrapped() -> None:
    model = nn.Linear(4, 3)
    offbeat.attach(DistributedDataParallel(model), loops.sgd(model), BSP())


def _class() -> None:
    model = nn.Linear(4, 3)
    offbeat.attach(model, loops.sgd(model), LocalSGD)  # type: ignore[arg-type]


def _nothing_to_train() -> None:
    model = nn.Linear(4, 3).requires_grad_(False)
    offbeat.attach(model, loops.sgd(model), BSP())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_strangers, ["2 parameters that are not the model's", "[2, 7]"]),
        (_wrapped, ["DistributedDataParallel", "bare model"]),
        (_class, ["the class LocalSGD", "instance"]),
        (_nothing_to_train, ["no trainable parameter"]),
    ],
)
def test_what_cannot_be_attached(crew, function: Callable[[], None], words: list[str]) -> None:
    expect(crew(1), offbeat.SettingError, words, function)


# --- what cannot happen later on


def _meddled(strategy: Any, meddle: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(20, 6), nn.Linear(6, 5))
    model[0].requires_grad_(False)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S):
        meddle(model)
        dtype = model[1].weight.dtype
        loops.train(model, optimizer, ((x.to(dtype), y) for x, y in loops.batches(dist.get_rank(), 3)))


def _to_double(model: nn.Module) -> None:
    model.double()


def _thaw(model: nn.Module) -> None:
    model[0].requires_grad_(True)


@BOTH
@pytest.mark.parametrize("world", [1, 2])
def test_model_moved_after_attach(crew, strategy: Any, world: int) -> None:
    words = ["parameter 1.", "moved", "model.to()", "before attach"]
    expect(crew(world), offbeat.OffbeatError, words, _meddled, strategy, _to_double)


@BOTH
def test_parameter_unfrozen_after_attach(crew, strategy: Any) -> None:
    words = ["parameter 0.weight was frozen", "attach again"]
    expect(crew(2), offbeat.OffbeatError, words, _meddled, strategy, _thaw)


def _sparse(strategy: offbeat.Strategy[Any]) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", [BSP(), offbeat.SSP(push="gradient")], ids=lambda each: each.name)
def test_sparse_gradient(crew, strategy: offbeat.Strategy[Any]) -> None:
    expect(crew(2), offbeat.OffbeatError, ["parameter weight", "sparse=False"], _sparse, strategy)


# --- strategies that wait for what no world can bring


@types.coroutine
def _bare_yield() -> Generator[None, None, None]:
    yield


@dataclass(frozen=True, kw_only=True)
class Dozing(offbeat.Strategy[None]):
    name = "dozing"
    summary = "awaits what it should not"
    bare: bool = False

    def init(self, replica: offbeat.Replica) -> None: ...

    async def step(self, state: None, replica: offbeat.Replica, port: offbeat.Port) -> None:
        await (_bare_yield() if self.bare else asyncio.sleep(0))


def _dozes(bare: bool) -> None:
    loops.attached(dist.get_rank(), Dozing(bare=bare), steps=1)


@pytest.mark.parametrize("bare", [False, True])
def test_awaiting_something_else(crew, bare: bool) -> None:
    expect(crew(2), offbeat.OffbeatError, ["may await only", "Pending", "NoneType"], _dozes, bare)


# --- samples


def _untold() -> None:
    model = nn.Linear(20, 5)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, LocalSGD(period=1, weighted=True), timeout_s=HANG_S):
        loops.train(model, optimizer, loops.batches(dist.get_rank(), 1))


def test_weighting_without_samples(crew) -> None:
    expect(crew(2), offbeat.SettingError, ["sync.samples(len(batch))"], _untold)


# --- optimizers and wrappers


def _two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 6), nn.Linear(6, 5))


def _refusal(model: nn.Module, *optimizers: Optimizer) -> str:
    with pytest.raises(offbeat.SettingError) as told:
        check_attachable(model, optimizers, BSP())
    return str(told.value)


def test_a_parameter_that_no_optimizer_steps_is_named() -> None:
    model = _two_layers()
    text = _refusal(model, loops.sgd(model[1]))
    assert "no attached optimizer steps 0.weight, 0.bias:" in text
    assert "attach(model, [first, second], strategy)" in text
    model[0].requires_grad_(False)
    check_attachable(model, [loops.sgd(model[1])], BSP())  # a frozen one needs none


def test_of_many_such_parameters_three_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    assert "steps 0.weight, 0.bias, 1.weight and 3 more:" in _refusal(model, loops.sgd(model[3]))


def test_a_parameter_in_two_optimizers_is_named() -> None:
    model = _two_layers()
    text = _refusal(model, loops.sgd(model), torch.optim.SGD([model[1].bias], lr=0.1))
    assert text == "parameter 1.bias belongs to two of the optimizers: give it to one"


def test_a_tied_parameter_belongs_to_one_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    check_attachable(model, [loops.sgd(model)], BSP())


@pytest.mark.parametrize("given", [[], "sgd", [1]])
def test_what_is_no_optimizer(given: Any) -> None:
    with pytest.raises(offbeat.SettingError, match=r"must be a torch optimizer or a list.*\[muon, adamw\]"):
        unwrap(given)


class AccelerateLike(Optimizer):
    """Forwards its groups to the optimizer inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class LightningLike(Optimizer):
    """Shares the attributes of the optimizer inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__.update(optimizer.__dict__)
        self._optimizer = optimizer


class Facade(Optimizer):
    """Has an optimizer inside that steps a part of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.optimizer = loops.sgd(model[1])  # type: ignore[index]


def test_wrappers_of_frameworks_are_taken_off_and_others_are_not() -> None:
    model = _two_layers()
    bare, facade = loops.sgd(model), Facade(model)
    assert unwrap(AccelerateLike(bare)) == [bare]
    assert unwrap([LightningLike(bare), AccelerateLike(LightningLike(bare))]) == [bare, bare]
    assert unwrap(facade) == [facade]


class FSDP1(FullyShardedDataParallel):
    """Around a model, without what a real one needs of a device."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = model
        self.training_state = None


def _wrappers() -> dict[str, str]:
    """What is said of each wrapper; and that one which nobody holds any more is none."""
    said = {}
    around, inside = _two_layers(), _two_layers()
    cases = {
        "around": (around, DistributedDataParallel(around)),
        "inside": (inside, DistributedDataParallel(inside[1])),
        "fsdp": (model := _two_layers(), FSDP1(model)),
    }
    for name, (model, _) in cases.items():
        try:
            offbeat.attach(model, loops.sgd(model), BSP(), timeout_s=HANG_S).close()
        except offbeat.SettingError as told:
            said[name] = str(told)
    del cases
    offbeat.attach(around, loops.sgd(around), BSP(), timeout_s=HANG_S).close()
    optimizer = loops.sgd(inside)
    try:
        with offbeat.attach(inside, optimizer, BSP(), timeout_s=HANG_S):
            wrapped = DistributedDataParallel(inside)
            nn.functional.cross_entropy(wrapped(torch.ones(2, 20)), torch.tensor([1, 2])).backward()
    except offbeat.SettingError as told:
        said["after"] = str(told)
    return said


def test_a_live_wrapper_that_averages_gradients_is_refused_wherever_it_is(crew) -> None:
    [said] = crew(1).run(_wrappers)
    assert said.keys() == {"around", "inside", "fsdp", "after"}
    for name, text in said.items():
        wrapper = "FullyShardedDataParallel" if name == "fsdp" else "DistributedDataParallel"
        assert f"wrapped in {wrapper}" in text
        assert "averages the gradients of all ranks itself" in text
