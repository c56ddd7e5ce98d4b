"""attach: what it gives every rank, what it counts, and what it leaves behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import BSP, LocalSGD
from tests.conformance.features import spoilt
from tests.support import loops
from tests.support.beside import lightly
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.processes

BOTH = pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=2)], ids=str)
Tensors = dict[str, Tensor]


class Motley(nn.Module):
    """Parameters and buffers of many kinds, other ones on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.body = nn.Linear(20, 5)
        self.frozen = nn.Parameter(torch.randn(3, 4).t(), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("mean", torch.randn(2, 3).t())
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) * self.scale + self.wide.sum().float()
        return out


def _given(strategy: Any) -> tuple[Tensors, Tensors, bool]:
    model = Motley(dist.get_rank())
    own = loops.tensors(model)
    strides = [t.stride() for t in model.state_dict().values()]
    with offbeat.attach(model, loops.sgd(model), strategy, timeout_s=HANG_S):
        return own, loops.tensors(model), strides == [t.stride() for t in model.state_dict().values()]


@BOTH
def test_every_rank_starts_with_rank_0s_model(crew, strategy: Any) -> None:
    (first, given, _), (_, given_there, same_strides) = crew(2).run(_given, strategy)
    assert loops.equal(first, given)
    assert loops.equal(first, given_there)
    assert same_strides


def _closing(strategy: Any) -> tuple[bool, Tensors, Tensors, Tensors, Any, Any]:
    rank = dist.get_rank()
    model = loops.mlp()
    optimizer = loops.momentum(model)
    sync = offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S)
    loops.train(model, optimizer, loops.batches(rank, 4))
    at_end, counted = loops.tensors(model), sync.metrics
    sync.close()
    sync.close()  # a second time changes nothing
    closed = loops.tensors(model)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alone = all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    loops.train(model, optimizer, loops.batches(rank, 3))  # on its own, as if nothing had ever been attached
    own_memory = alone and len(storages) == len(list(model.parameters()))
    return own_memory, at_end, closed, loops.tensors(model), counted, sync.metrics


@BOTH
def test_close_leaves_a_plain_model(crew, strategy: Any) -> None:
    results = crew(2).run(_closing, strategy)
    for own_memory, at_end, closed, _, counted, counted_later in results:
        assert own_memory
        if strategy.identical_replicas:
            assert loops.equal(at_end, closed)
        assert counted.steps == counted_later.steps == 4
        assert counted.bytes_sent == counted_later.bytes_sent
    assert not loops.equal(results[0][3], results[1][3])  # what came after went its own way


def _attach_twice() -> tuple[list[str], Tensor]:
    model, other = loops.mlp(), loops.mlp()
    optimizer = loops.sgd(model)
    messages = []
    with offbeat.attach(model, optimizer, BSP(), timeout_s=HANG_S):
        for again in (lambda: loops.sgd(model), lambda: optimizer):
            try:
                offbeat.attach(model, again(), BSP())
            except offbeat.OffbeatError as told:
                messages.append(str(told))
        offbeat.attach(other, loops.sgd(other), LocalSGD(period=2), timeout_s=HANG_S).close()
    with offbeat.attach(model, optimizer, LocalSGD(period=1), timeout_s=HANG_S):
        loops.train(model, optimizer, loops.batches(dist.get_rank(), 3))
    return messages, loops.flat(model)


def test_attaching_twice_is_refused_and_again_after_close_works(crew) -> None:
    (messages, one), (_, other) = crew(2).run(_attach_twice)
    assert len(messages) == 2
    assert all("attached already" in message for message in messages)
    assert torch.equal(one, other)


def _use_after_close() -> list[str]:
    model = loops.mlp()
    sync = offbeat.attach(model, loops.sgd(model), BSP(), timeout_s=HANG_S)
    saved = sync.state_dict()
    sync.close()
    messages = []
    for use in (sync.state_dict, lambda: sync.load_state_dict(saved), lambda: sync.consensus().__enter__()):
        try:
            use()
        except offbeat.OffbeatError as told:
            messages.append(str(told))
    return messages


def test_use_after_close(crew) -> None:
    for messages in crew(2).run(_use_after_close):
        assert len(messages) == 3
        assert all("closed; attach again" in message for message in messages)


def _count_left_over(times: int) -> tuple[int, int]:
    """Threads after attaching once, which makes what is made once, and after several times more."""
    loops.attached(dist.get_rank(), BSP(), steps=1)
    gc.collect()
    before = _threads()
    for _ in range(times + 1):
        loops.attached(dist.get_rank(), BSP(), steps=1)
    gc.collect()
    until(lambda: _threads() <= before)  # one that has been told to end may take a moment
    return before, _threads()


def _threads() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_close_leaves_no_threads_behind(crew) -> None:
    for before, after in crew(2).run(_count_left_over, 4):
        assert after <= before


def _weighted_pair(overflow: bool) -> tuple[tuple[Tensor, Tensor], int]:
    """The weights just before and just after the average that ends a period of two."""
    rank = dist.get_rank()
    model = nn.Linear(20, 5)
    optimizer = loops.sgd(model)
    stepped: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(loops.flat(model)))
    data = loops.batches(rank, 3, size=24 if rank else 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with offbeat.attach(model, optimizer, LocalSGD(period=2, weighted=True), timeout_s=HANG_S) as sync:
        if overflow and rank:
            data = spoilt(data, 1)
        averaged: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: averaged.append(loops.flat(model)))
        loops.train(model, optimizer, data, samples=sync.samples, scaler=scaler)
    return (stepped[-2], averaged[-1]), len(stepped)


@pytest.mark.parametrize("overflow", [False, True])
def test_weights_count_by_samples(crew, overflow: bool) -> None:
    (one, _), (other, _) = crew(2).run(_weighted_pair, overflow)
    mean = one[0] * 0.25 + other[0] * 0.75
    torch.testing.assert_close(one[1], mean, rtol=0, atol=torch.finfo(torch.float32).eps)
    assert torch.equal(one[1], other[1])


def _exchange_after_each_step(strategy: offbeat.Strategy[Any]) -> tuple[Tensor, int]:
    """The loop exchanges something after each step, of which one rank's scaler skips the second."""
    rank = dist.get_rank()
    model = nn.Linear(20, 5)
    optimizer = loops.sgd(model)
    data = loops.batches(rank, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:

        def exchange(step: int) -> None:
            sync.end_step()
            dist.all_reduce(torch.tensor(float(step)))

        loops.train(model, optimizer, spoilt(data, 1) if rank else data, scaler=scaler, after_step=exchange)
        steps = sync.metrics.steps
    return loops.flat(model), steps


@pytest.mark.parametrize("strategy", [LocalSGD(period=2), offbeat.DiLoCo(period=2)], ids=repr)
def test_skipped_step_that_is_ended_lets_the_loop_exchange(crew, strategy: offbeat.Strategy[Any]) -> None:
    (one, steps), (other, steps_there) = crew(2).run(_exchange_after_each_step, strategy)
    assert steps == steps_there == 4
    assert torch.equal(one, other)


class Failing(torch.autograd.Function):
    """An identity whose backward runs out of memory, say, when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise MemoryError
        return grad, None


def _survive(strategy: Any, steps: int) -> tuple[int, Tensor] | str:
    """A loop that leaves out a batch whose backward failed, after the last layer's gradient was there."""
    rank = dist.get_rank()
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        for step, (x, y) in enumerate(loops.batches(rank, steps)):
            optimizer.zero_grad()
            out = model[2:](Failing.apply(model[:2](x), step == 1))
            try:
                nn.functional.cross_entropy(out, y).backward()
                optimizer.step()
            except MemoryError:
                continue
            except offbeat.OffbeatError as told:
                return str(told)
        with sync.consensus():
            return sync.metrics.steps, loops.flat(model)


@BOTH
def test_a_backward_that_fails_never_ends_the_exchange_unnoticed(crew, strategy: Any) -> None:
    """Either the batch is left out, and training goes on in step; or the next step says what is wrong."""
    one, other = crew(2).run(_survive, strategy, 7)
    if isinstance(one, str):
        assert "backward" in one
        assert "backward" in other
    else:
        assert one[0] == other[0] == 6
        assert torch.equal(one[1], other[1])


def _shaped(bandwidth: str | None) -> tuple[Tensor, Any]:
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, BSP(), timeout_s=HANG_S, bandwidth=bandwidth) as sync:
        loops.train(model, optimizer, loops.batches(dist.get_rank(), 3))
        return loops.flat(model), sync.metrics


def test_emulated_bandwidth_changes_time_only(crew) -> None:
    for (plain, free), (slow, paid) in zip(
        crew(2).run(_shaped, None), crew(2).run(_shaped, "8mbit"), strict=True
    ):
        assert torch.equal(plain, slow)
        assert free.bytes_sent == paid.bytes_sent
        assert paid.communicate_s >= paid.bytes_sent / 1e6


# --- attach that fails


def _mismatch(model: nn.Module) -> None:
    offbeat.attach(model, loops.sgd(model), LocalSGD(period=2 + dist.get_rank()), timeout_s=HANG_S)


def _unowned(model: nn.Module) -> None:
    offbeat.attach(model, loops.sgd(model[0]), BSP(), timeout_s=HANG_S)  # type: ignore[index]


def _unreachable(model: nn.Module) -> None:
    port = free_port()
    offbeat.attach(model, loops.sgd(model), offbeat.ASP(), server=f"127.0.0.1:{port}", timeout_s=1.0)


def _refused_by_the_strategy(model: nn.Module) -> None:
    offbeat.attach(model, torch.optim.LBFGS(model.parameters()), offbeat.SSDSGD(), timeout_s=HANG_S)


def _refused_by_the_server(model: nn.Module) -> None:
    strategy = offbeat.SSP(push="gradient")
    offbeat.attach(model, torch.optim.LBFGS(model.parameters()), strategy, timeout_s=HANG_S)


FAILING = [_mismatch, _unowned, _unreachable, _refused_by_the_strategy, _refused_by_the_server]


def _after_failures() -> tuple[list[str], Tensor]:
    rank = dist.get_rank()
    model = loops.mlp(rank)
    before = loops.tensors(model)
    group, said = dist.group.WORLD, []
    for fails in FAILING:
        try:
            fails(model)
        except offbeat.OffbeatError as told:
            said.append(f"{fails.__name__}: {type(told).__name__}")
        assert loops.equal(before, loops.tensors(model))
        assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(before)
        assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
        assert dist.group.WORLD is group
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, BSP(), timeout_s=HANG_S):
        loops.train(model, optimizer, loops.batches(rank, 3))
    return said, loops.flat(model)


def test_attach_that_fails_leaves_nothing_and_the_next_one_works(crew) -> None:
    (said, one), (said_there, other) = crew(2).run(_after_failures)
    assert [each.split(":")[0] for each in said] == [fails.__name__ for fails in FAILING]
    assert said == said_there
    assert torch.equal(one, other)


# --- if rank == 0


def _one_rank_looks(strategy: Any) -> None:
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, 4))
        if rank == 0:
            if sync.port.client is not None:  # a server cannot tell that nobody will come
                sync.port.timeout_s = SILENCE_S
            with sync.consensus():
                pass
        loops.train(model, optimizer, loops.batches(rank, 40))


@pytest.mark.parametrize("strategy", [BSP(), LocalSGD(period=8), offbeat.SSP(staleness=1)], ids=str)
def test_a_consensus_of_one_rank_is_an_error_on_both(crew, strategy: Any) -> None:
    crew(2).start(lightly, _one_rank_looks, strategy)
    for rank, (well, value) in enumerate(crew(2).outcomes()):
        assert not well
        name, message, _ = value
        assert name == "RankLost", message
        assert "all ranks must call it together" in message or (rank == 1 and "rank 0" in message)
