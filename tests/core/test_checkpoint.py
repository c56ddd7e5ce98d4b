"""Checkpoints: through torch.distributed.checkpoint, with operations in flight, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

import offbeat
from offbeat import BSP, Lane, LocalSGD, Pending, Port, Replica, SelSync
from tests.conformance.features import batch_norm
from tests.support import loops
from tests.support.crew import Crew
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

STEPS, STOP = 10, 6
Tensors = dict[str, Tensor]
Use = Callable[[nn.Module, Optimizer, offbeat.Sync], None]


def _part(strategy: Any, optimizer: str, first: int, last: int, enter: Use, leave: Use) -> Tensors:
    """Steps `first` to `last`, with a model and an optimizer of their own."""
    rank = dist.get_rank()
    model = batch_norm(10 * first + rank)
    opt = loops.OPTIMIZERS[optimizer](model)
    with offbeat.attach(model, opt, strategy, timeout_s=HANG_S) as sync:
        enter(model, opt, sync)
        loops.train(model, opt, islice(loops.batches(rank, last), first, None), samples=sync.samples)
        leave(model, opt, sync)
        return loops.tensors(model)


def _nothing(model: nn.Module, optimizer: Optimizer, sync: offbeat.Sync) -> None: ...


def _load(saved: dict[str, Any]) -> Use:
    return lambda model, optimizer, sync: sync.load_state_dict(saved)


def _distributed(strategy: Any, optimizer: str, folder: str, at_once: bool) -> tuple[Tensors, Tensors]:
    """A run without a stop, and one that was saved and loaded by torch.distributed.checkpoint."""

    def everything(model: nn.Module, opt: Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, opt)}

    def save(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        dcp.save({**everything(model, opt), "sync": sync}, checkpoint_id=folder)

    def load(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        shared = everything(model, opt)
        if at_once:
            dcp.load({**shared, "sync": sync}, checkpoint_id=folder)
            return
        dcp.load(shared, checkpoint_id=folder)
        set_optimizer_state_dict(model, opt, shared["optimizer"])
        dcp.load({"sync": sync}, checkpoint_id=folder)

    straight = _part(strategy, optimizer, 0, STEPS, _nothing, _nothing)
    _part(strategy, optimizer, 0, STOP, _nothing, save)
    return straight, _part(strategy, optimizer, STOP, STEPS, load, _nothing)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize(
    ("strategy", "at_once"),
    [(BSP(), False), (LocalSGD(period=4), False), (LocalSGD(period=4), True)],
    ids=str,
)
def test_torch_distributed_checkpoint(crew, tmp_path, strategy: Any, optimizer: str, at_once: bool) -> None:
    results = crew(2).run(_distributed, strategy, optimizer, str(tmp_path), at_once)
    for straight, resumed in results:
        assert loops.equal(straight, resumed)
    assert loops.equal(results[0][0], results[1][0]) == strategy.identical_replicas


@dataclass
class Waiting:
    flying: Pending[Tensor] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class OneStepLate(offbeat.Strategy[Waiting]):
    """Goes half the way to where all were, on average, one step ago."""

    name = "one_step_late"
    summary = "always has something in flight between steps"

    def init(self, replica: Replica) -> Waiting:
        return Waiting()

    async def step(self, state: Waiting, replica: Replica, port: Port) -> None:
        await replica.update()
        mine = replica.weights[0].clone()
        state.history.append({"steps": (len(state.history), "so far"), "norm": mine.norm()})
        if state.flying is not None:
            replica.weights[0].lerp_(await state.flying, 0.5)
        state.flying = port.all_reduce(mine, lane=Lane.BACK)

    async def drain(self, state: Waiting, replica: Replica, port: Port) -> None:
        if state.flying is not None:
            await state.flying  # it has arrived, and is used in the next step as it would have been


def _in_flight() -> tuple[Tensors, Tensors, list[Any], list[Any]]:
    saved: dict[str, Any] = {}
    states: list[list[Any]] = []

    def save(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        saved.update(sync.state_dict())

    def remember(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        states.append(
            [(list(each["steps"]), each["norm"].item()) for each in sync._session.conductor.state.history]
        )

    straight = _part(OneStepLate(), "momentum", 0, STEPS, _nothing, remember)
    _part(OneStepLate(), "momentum", 0, STOP, _nothing, save)
    resumed = _part(OneStepLate(), "momentum", STOP, STEPS, _load(saved), remember)
    return straight, resumed, states[0], states[1]


def test_what_is_in_flight_is_saved_too(crew) -> None:
    for straight, resumed, history, history_resumed in crew(2).run(_in_flight):
        assert loops.equal(straight, resumed)
        assert history == history_resumed


def _saving(times: int) -> Tensors:
    def save_and_go_on(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        for _ in range(times):
            sync.state_dict()
        loops.train(model, opt, loops.batches(dist.get_rank(), 4, seed=7))

    return _part(OneStepLate(), "momentum", 0, STOP, _nothing, save_and_go_on)


def test_saving_does_not_change_the_training(crew) -> None:
    for saved, unsaved in zip(crew(2).run(_saving, 2), crew(2).run(_saving, 0), strict=True):
        assert loops.equal(saved, unsaved)


def _skipped() -> tuple[Tensors, Tensors]:
    """The scaler skips the last step before saving, on one rank."""
    saved: dict[str, Any] = {}

    def skip(model: nn.Module, opt: Optimizer) -> None:
        overflow = model[0].bias.register_hook(lambda grad: grad / (1 - dist.get_rank()))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        loops.train(model, opt, loops.batches(dist.get_rank(), 1), scaler=scaler)
        overflow.remove()

    def skip_and_save(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        skip(model, opt)
        saved.update(sync.state_dict())

    def skip_and_go_on(model: nn.Module, opt: Optimizer, sync: offbeat.Sync) -> None:
        skip(model, opt)
        loops.train(model, opt, islice(loops.batches(dist.get_rank(), STEPS), STOP, None))

    straight = _part(LocalSGD(period=4), "momentum", 0, STOP, _nothing, skip_and_go_on)
    _part(LocalSGD(period=4), "momentum", 0, STOP, _nothing, skip_and_save)
    return straight, _part(LocalSGD(period=4), "momentum", STOP, STEPS, _load(saved), _nothing)


def test_saving_after_a_step_that_the_scaler_skipped(crew) -> None:
    """The loop did call scaler.step(optimizer): it cannot know that nothing came of it."""
    for straight, resumed in crew(2).run(_skipped):
        assert loops.equal(straight, resumed)


# --- what is refused


def _saved(strategy: Any) -> dict[str, Any]:
    model = nn.Linear(20, 5)
    with offbeat.attach(model, loops.sgd(model), strategy, timeout_s=HANG_S) as sync:
        return sync.state_dict()


def _refusal(strategy: Any, saved: list[dict[str, Any]]) -> tuple[str, str]:
    model = nn.Linear(20, 5)
    with offbeat.attach(model, loops.sgd(model), strategy, timeout_s=HANG_S) as sync:
        try:
            sync.load_state_dict(saved[dist.get_rank()])
        except offbeat.OffbeatError as told:
            return type(told).__name__, str(told)
        return "nothing", ""


def _expect_refusal(crew: Crew, strategy: Any, saved: list[dict[str, Any]], *words: str) -> None:
    for error, message in crew.run(_refusal, strategy, saved):
        assert error == "SettingError"
        assert all(word in message for word in words)


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=5)], ids=str)
def test_another_strategy_or_setting(crew, strategy: Any) -> None:
    saved = crew(2).run(_saved, LocalSGD(period=4))
    now = f"{strategy.name} {strategy.settings()} is attached"
    _expect_refusal(crew(2), strategy, saved, "under local_sgd {'codec': None, 'period': 4", now)


def test_a_codec_that_older_versions_listed_and_never_took(crew) -> None:
    (saved,) = crew(1).run(_saved, SelSync())
    assert "codec" not in saved["settings"]
    older = {**saved, "settings": {"codec": None, **saved["settings"]}}
    assert crew(1).run(_refusal, SelSync(), [older]) == [("nothing", "")]
    other = {**saved, "settings": {"codec": "half", **saved["settings"]}}
    _expect_refusal(crew(1), SelSync(), [other], "under selsync {'codec': 'half'")


@pytest.mark.parametrize("change", [lambda state: state.pop("step"), lambda state: state.update(wires=[])])
def test_a_state_of_another_version(crew, change: Callable[[dict[str, Any]], Any]) -> None:
    """With a field too few, or one too many: neither is guessed."""
    saved = crew(1).run(_saved, LocalSGD(period=2))
    own = torch.load(io.BytesIO(saved[0]["rank0"]), weights_only=True)
    change(own["state"])
    blob = io.BytesIO()
    torch.save(own, blob)
    other = [{**saved[0], "rank0": blob.getvalue()}]
    _expect_refusal(crew(1), LocalSGD(period=2), other, "another LocalSGDState", "made by another version")


def test_another_number_of_ranks(crew) -> None:
    _expect_refusal(crew(2), BSP(), crew(1).run(_saved, BSP()) * 2, "of 1 ranks", "of 2")


def test_the_checkpoint_of_another_rank(crew) -> None:
    saved = crew(2).run(_saved, BSP())
    _expect_refusal(crew(2), BSP(), saved[::-1], "of 2 ranks and holds rank", "; this is rank")


def _half_done(strategy: Any) -> str:
    model = nn.Linear(20, 5)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        model(torch.ones(1, 20)).sum().backward()
        try:
            sync.state_dict()
            optimizer.step()
        except offbeat.OffbeatError as told:
            return str(told)
        return ""


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2)], ids=str)
def test_saving_between_backward_and_the_optimizer(crew, strategy: Any) -> None:
    for message in crew(2).run(_half_done, strategy):
        assert "save after optimizer.step()" in message


@dataclass(frozen=True, kw_only=True)
class Unsavable(OneStepLate):
    def init(self, replica: Replica) -> Waiting:
        return Waiting(history={1, 2})  # type: ignore[arg-type]


def test_a_state_that_cannot_be_saved(crew) -> None:
    crew(1).start(_saved, Unsavable())
    ((_, (error, message, _)),) = crew(1).outcomes()
    assert error == "OffbeatError"
    assert "state holds a set" in message
