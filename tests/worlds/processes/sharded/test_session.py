"""Strategies between replicas that FSDP2 has sharded: as between replicas that are not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import offbeat
from offbeat import (
    ASP,
    BSP,
    DSSP,
    GSSP,
    OSP,
    SSDSGD,
    SSP,
    DiLoCo,
    ErrorFeedback,
    Half,
    LocalSGD,
    Oscars,
    Quantize,
    SelSync,
    TopK,
)
from tests.conformance.table import AnyStrategy
from tests.support.limits import HANG_S
from tests.support.sharded_runs import (
    adam,
    batch,
    blocks_of_any_size,
    even,
    farthest,
    mesh,
    place_of,
    sgd,
    shard,
    step,
    trained,
    twice,
    uneven,
    whole,
)

pytestmark = pytest.mark.processes

ROUNDING = 5e-6  # of 50 steps in float32; sums of halves have another order

ELEMENTWISE: list[AnyStrategy] = [
    BSP(),
    BSP(codec=Half()),
    LocalSGD(period=4),
    LocalSGD(period=3, weighted=True),
    SelSync(delta=0.05, window=5),
    SelSync(delta=0.05, window=5, aggregate="gradients", late=True),
    DiLoCo(period=6),
    ASP(),
    SSP(staleness=0),
    DSSP(low=0, high=0, push="update"),  # Adam at the server steps at every push, in the order of arrival
    GSSP(staleness=0, groups="0,1", push="update"),
    Oscars(tau=1, limit=0.001, patience=1000.0),
]
# What these do to an element depends on where it lies in the flat weights: on blocks, slices or fragments.
BY_PLACE: list[AnyStrategy] = [
    OSP(budget=0.5, growth=5),
    OSP(budget=0.5, growth=5, on="server"),
    SSDSGD(warmup=5, delay=2),
    SSDSGD(warmup=5, delay=2, on="server"),
    DiLoCo(period=8, fragments=2, delay=2),
]


def _expect_equal(crew: Any, strategy: AnyStrategy, *how: Any, **limits: float) -> None:
    sharded = crew(4).run(trained, strategy, *how[:2], "sharded", *how[2:])
    plain = crew(2).run(trained, strategy, *how[:2], "plain", *how[2:])
    for rank, (published, own) in enumerate(sharded):
        assert farthest(published, plain[0][0]) < limits.get("limit", ROUNDING)
        assert farthest(own, plain[rank // 2][1]) < limits.get("limit", ROUNDING)


@pytest.mark.parametrize("strategy", ELEMENTWISE, ids=str)
def test_sharded_unevenly_it_equals_unsharded_replicas(crew, strategy: AnyStrategy) -> None:
    limit = 0.02 if getattr(strategy, "codec", None) else ROUNDING  # a bit more or less after rounding
    _expect_equal(crew, strategy, uneven, adam, limit=limit)


@pytest.mark.parametrize("strategy", BY_PLACE, ids=str)
def test_sharded_evenly_it_equals_unsharded_replicas(crew, strategy: AnyStrategy) -> None:
    _expect_equal(crew, strategy, even, sgd)


@pytest.mark.parametrize(
    "strategy", [OSP(budget=0.5, growth=5), SelSync(delta=0.05, window=5), BSP()], ids=str
)
def test_gradients_are_clipped_by_the_norm_of_all_parts(crew, strategy: AnyStrategy) -> None:
    """OSP multiplies late gradients by the same factor, and SelSync looks at clipped ones."""
    _expect_equal(crew, strategy, even, sgd, 30, 0.05)


def _pulled(strategy: AnyStrategy, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train a layer whose gradient is the same in every step; return how far it went, and should have gone.

    Both are in units of the learning rate; the gradients' sizes are between 0.5 and 1.5.
    """
    replica = place_of(2)[0]
    factors = [1 + torch.rand(7, generator=torch.Generator().manual_seed(r)) - 0.5 for r in range(2)]
    signs = torch.arange(9).remainder(2) * 2.0 - 1.0
    model = nn.Sequential(nn.Linear(7, 9, bias=False))
    fully_sharded = shard(model)
    start = whole(model)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, group=mesh()["replica"]):
        for _ in range(steps):
            optimizer.zero_grad()
            (fully_sharded(factors[replica][None]) * signs).sum().backward()
            optimizer.step()
    return (start - whole(model)[0]) / 0.125, steps * torch.outer(signs, (factors[0] + factors[1]) / 2)


@pytest.mark.parametrize("codec", [TopK(0.25, sampled=False), Quantize(bits=1)], ids=str)
def test_each_part_keeps_what_its_codec_left_out(crew, codec: Any) -> None:
    """With error feedback no entry falls behind by more than a few steps, whatever is left out of each."""
    for gone, wanted in crew(4).run(_pulled, BSP(codec=ErrorFeedback(codec)), 40):
        assert (gone - wanted).abs().max() < 12
    if isinstance(codec, TopK):
        behind = [(gone - wanted).abs().max() for gone, wanted in crew(4).run(_pulled, BSP(codec=codec), 40)]
        assert min(behind) > 20, "the test sees what is left out"


def test_a_layer_that_is_used_twice_is_sent_once_and_complete(crew) -> None:
    _expect_equal(crew, BSP(), twice, sgd, 10)


@pytest.mark.parametrize("strategy", [LocalSGD(period=4), SSDSGD(warmup=3, delay=3)], ids=str)
def test_evaluating_changes_nothing(crew, strategy: AnyStrategy) -> None:
    """FSDP2 keeps the root's gathered weights after a forward without backward: they would be stale."""
    plain = crew(4).run(trained, strategy, uneven, sgd, "sharded", 20)
    watched = crew(4).run(trained, strategy, uneven, sgd, "sharded", 20, 0.0, 3)
    assert all(farthest(a[1], b[1]) == 0 for a, b in zip(plain, watched, strict=True))


def _accumulated(sharded: bool, policy: bool) -> list[torch.Tensor]:
    """Train with two backwards per step, of which the first does not reduce; return all weights."""
    model = uneven()
    groups: dict[str, Any] = {}
    ranks = 2 if sharded else 1
    if sharded:
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if policy else {}
        shard(model, **options)
        groups["group"] = mesh()["replica"]
    optimizer = sgd(model)
    replica, rank, _ = place_of(ranks)
    with offbeat.attach(model, optimizer, BSP(), timeout_s=HANG_S, **groups) as sync:
        for number in range(10):
            optimizer.zero_grad()
            for last, half in enumerate(
                zip(*(t.chunk(2) for t in batch(model, number, replica)), strict=True)
            ):
                x, y = (t.chunk(ranks)[rank] for t in half)
                if sharded:
                    model.set_requires_gradient_sync(bool(last))  # type: ignore[operator]
                    ((model(x) - y) ** 2).mean().backward()
                elif last:
                    ((model(x) - y) ** 2).mean().backward()
                else:
                    with sync.no_sync():
                        ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        return whole(model)


def test_gradients_that_fsdp_accumulates_are_sent_with_the_last_backward(crew) -> None:
    sharded, plain = crew(4).run(_accumulated, True, False), crew(2).run(_accumulated, False, False)
    assert all(farthest(weights, plain[0]) < ROUNDING for weights in sharded)
    mixed = crew(4).run(_accumulated, True, True)
    assert all(0 < farthest(weights, plain[0]) < 0.05 for weights in mixed)
    assert all(farthest(weights, mixed[0]) == 0 for weights in mixed)


def _loop(kind: str, strategy: AnyStrategy, sharded: bool) -> tuple[Any, list[torch.Tensor]]:
    """Train by a loop that is not plain; return the weights inside consensus() and after close()."""
    model = even() if isinstance(strategy, OSP) else uneven()  # its choice depends on where elements lie
    ranks, groups = 1, {}
    if sharded:
        shard(model)
        ranks, groups = 2, {"group": mesh()["replica"]}
    replica, rank, _ = place_of(ranks)
    params = list(model.parameters())
    halves = [params[:2], params[2:]] if kind == "two optimizers" else [params]
    optimizers = [torch.optim.SGD(half, lr=0.05 / n, momentum=0.9) for n, half in enumerate(halves, 1)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=kind == "scaler")
    with offbeat.attach(model, optimizers, strategy, timeout_s=HANG_S, **groups) as sync:
        for number in range(8):
            x, y = (t.chunk(ranks)[rank] for t in batch(model, number, replica))

            def loss(x: Any = x, y: Any = y, number: int = number) -> Any:
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=number % 2 == 0)
                parts = 2 if kind == "accumulation" else 1
                for k in range(parts):
                    value = ((model(x[k::parts]) - y[k::parts]) ** 2).mean()
                    overflow = float("inf") if kind == "scaler" and number in (3, 4) else 1.0
                    scaler.scale(value * overflow).backward()
                return value.detach()

            if kind == "closure":
                optimizers[0].step(loss)  # type: ignore[arg-type]
                continue
            loss()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        sync.settle()
        with sync.consensus():
            published = whole(model)
    return published, whole(model)


@pytest.mark.parametrize("kind", ["accumulation", "two optimizers", "scaler", "closure"])
def test_every_loop_equals_that_of_unsharded_replicas_and_close_publishes(crew, kind: str) -> None:
    for strategy in (BSP(), LocalSGD(period=3), OSP(budget=0.5, growth=2)):
        sharded, plain = crew(4).run(_loop, kind, strategy, True), crew(2).run(_loop, kind, strategy, False)
        for published, closed in sharded:
            assert farthest(published, closed) == 0, "close() publishes what consensus() shows"
            assert farthest(closed, sharded[0][1]) == 0, "all ranks hold one model"
            assert farthest(closed, plain[0][1]) < ROUNDING


def _stopped(strategy: AnyStrategy, build: Any, stop: int, steps: int, folder: str = "") -> Any:
    """Train, stop after `stop` steps, resume with all objects made anew; return all weights."""
    place = place_of(2)
    model = shard(build())
    optimizer = adam(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, group=mesh()["replica"]) as sync:
        for number in range(stop or steps):
            step(model, optimizer, sync, number, place, 0.0)
        if not stop:
            return whole(model)
        saved = _state(model, optimizer, sync)
        if folder:
            dcp.save(saved, checkpoint_id=folder)
        saved = copy.deepcopy(saved)
    model = shard(build())
    optimizer = adam(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, group=mesh()["replica"]) as sync:
        if folder:
            saved = _state(model, optimizer, sync)
            dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        sync.load_state_dict(saved["offbeat"])
        for number in range(stop, steps):
            step(model, optimizer, sync, number, place, 0.0)
        return whole(model)


def _state(model: nn.Module, optimizer: Any, sync: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "offbeat": sync.state_dict()}


@pytest.mark.parametrize(
    "strategy",
    [
        BSP(),
        LocalSGD(period=4),
        SelSync(delta=0.05, window=3, late=True),
        OSP(budget=0.5, growth=2),
        SSDSGD(warmup=3, delay=2),
        DiLoCo(period=6, fragments=2, delay=2),
    ],
    ids=str,
)
def test_stopped_and_resumed_it_is_as_if_it_never_stopped(crew, strategy: AnyStrategy) -> None:
    straight = crew(4).run(_stopped, strategy, uneven, 0, 13)
    resumed = crew(4).run(_stopped, strategy, uneven, 7, 13)
    assert all(farthest(a, b) == 0 for a, b in zip(straight, resumed, strict=True))


def test_server_strategies_resume_too(crew) -> None:
    straight = crew(4).run(_stopped, SSP(staleness=0), uneven, 0, 13)
    resumed = crew(4).run(_stopped, SSP(staleness=0), uneven, 7, 13)
    assert all(farthest(a, b) < ROUNDING for a, b in zip(straight, resumed, strict=True))


def test_a_distributed_checkpoint_holds_the_state_of_every_rank(crew, tmp_path: Path) -> None:
    strategy = LocalSGD(period=4)
    straight = crew(4).run(_stopped, strategy, uneven, 0, 10)
    resumed = crew(4).run(_stopped, strategy, uneven, 6, 10, str(tmp_path))
    assert all(farthest(a, b) == 0 for a, b in zip(straight, resumed, strict=True))


def _late_blocks() -> list[list[int]]:
    model = shard(blocks_of_any_size())
    optimizer = sgd(model)
    chosen = []
    strategy = OSP(budget=0.5, growth=3)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, group=mesh()["replica"]) as sync:
        for number in range(20):
            step(model, optimizer, sync, number, place_of(2), 0.0)
            chosen.append(list(sync._session.conductor.state.late))
    return chosen


def test_all_parts_of_a_replica_are_late_together(crew) -> None:
    """Importance is that of whole blocks: ranks that hold little of a block choose as the others do."""
    chosen = crew(4).run(_late_blocks)
    assert all(choice == chosen[0] for choice in chosen)
    assert any(chosen[0])


def _moved() -> str:
    model = shard(uneven())
    optimizer = sgd(model)
    try:
        with offbeat.attach(model, optimizer, BSP(), timeout_s=HANG_S, group=mesh()["replica"]):
            param: Any = next(model.parameters())
            param._local_tensor = param._local_tensor.clone()
            model(batch(model, 0, 0)[0]).sum().backward()
    except offbeat.OffbeatError as error:
        dist.barrier()
        return str(error)
    return ""


def test_a_parameter_that_leaves_its_memory_is_noticed(crew) -> None:
    assert all("was moved to other memory after attach" in text for text in crew(4).run(_moved))
