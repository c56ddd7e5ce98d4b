"""Batch norm's statistics under each policy: exactly what averaging or copying them by hand gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat import ASP, BSP, GSSP, SSP, DiLoCo, LocalSGD
from tests.support import loops
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

STEPS = 7
Tensors = dict[str, torch.Tensor]
NAMES = ("running_mean", "running_var")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(20), nn.Linear(20, 5)
    )  # so its statistics depend on nothing but the data


def _unite(norms: list[nn.BatchNorm1d], policy: str, sent: list[Tensors] | None = None) -> None:
    """By what they are, or have sent before."""
    for name in NAMES:
        mine, theirs = (seen[name] for seen in sent or [loops.tensors(norm) for norm in norms])
        united = {"average": mine * 0.5 + theirs * 0.5, "broadcast": mine}.get(policy)
        for norm in norms:
            if united is not None:
                getattr(norm, name).copy_(united)


def _by_hand(policy: str, period: int, delay: int) -> tuple[list[Tensors], list[Tensors]]:
    """Both ranks' statistics, after training and in a consensus."""
    sent: list[Tensors] = []
    norms = [nn.BatchNorm1d(20) for _ in range(2)]
    data = [list(loops.batches(rank, STEPS)) for rank in range(2)]
    for step in range(STEPS):
        for norm, batches in zip(norms, data, strict=True):
            norm(batches[step][0])
        if (step + 1 + delay) % period == 0:
            sent = [loops.tensors(norm) for norm in norms]
        if (step + 1) % period == 0:
            _unite(norms, policy, sent)
    trained = [loops.tensors(norm) for norm in norms]
    _unite(norms, "average" if policy == "local" else policy)
    return trained, [loops.tensors(norm) for norm in norms]


def _run(
    strategy: Any, period: int, delay: int, policy: str
) -> tuple[Tensors, Tensors, Tensors, Tensors, Tensors]:
    rank = dist.get_rank()
    model = _model()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, buffers=policy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, STEPS))
        trained = loops.tensors(model[0])
        with sync.consensus():
            agreed = loops.tensors(model[0])
        after = loops.tensors(model[0])
    expected, expected_agreed = _by_hand(policy, period, delay)
    return expected[rank], trained, expected_agreed[rank], agreed, after


@pytest.mark.parametrize(
    ("strategy", "period", "delay"),
    [
        (BSP(), 1, 0),
        (LocalSGD(period=3), 3, 0),
        (DiLoCo(period=3, delay=2), 3, 2),
        (DiLoCo(period=4, fragments=2, delay=1), 4, 1),  # STEPS end with them under way
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["average", "broadcast", "local"])
def test_statistics_are_as_by_hand(crew, strategy: Any, period: int, delay: int, policy: str) -> None:
    results = crew(2).run(_run, strategy, period, delay, policy)
    for expected, trained, expected_agreed, agreed, after in results:
        for name in NAMES:
            assert torch.equal(trained[name], expected[name])
            assert torch.equal(agreed[name], expected_agreed[name])
            assert torch.equal(after[name], expected[name])
        assert trained["num_batches_tracked"] == agreed["num_batches_tracked"] == STEPS


def _count_more_on_rank_1() -> tuple[int, int, int]:
    rank = dist.get_rank()
    model = _model()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, LocalSGD(period=2), timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, loops.batches(rank, 4))
        for x, _ in loops.batches(rank, 3 * rank):
            model(x)
        counts = [int(model[0].num_batches_tracked)]
        with sync.consensus():
            counts.append(int(model[0].num_batches_tracked))
        counts.append(int(model[0].num_batches_tracked))
    return counts[0], counts[1], counts[2]


def test_counters_are_never_averaged(crew) -> None:
    assert crew(2).run(_count_more_on_rank_1) == [(4, 4, 4), (7, 4, 7)]


def _bad_policy() -> str:
    model = _model()
    try:
        offbeat.attach(model, loops.sgd(model), BSP(), buffers="mean", timeout_s=HANG_S)
    except offbeat.SettingError as told:
        return str(told)
    return ""


def test_a_policy_that_does_not_exist(crew) -> None:
    for message in crew(2).run(_bad_policy):
        assert "buffers='mean'" in message
        assert "average, broadcast, local" in message


class Drifting(nn.Module):
    """A bias that training raises at every step, and batch norm's running mean, which follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.bias.expand(len(inputs), 1)
        self.norm(outputs.detach())
        return outputs


@pytest.mark.virtual
@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=200), GSSP(groups="0/1")], ids=str)
def test_statistics_of_workers_that_ended_long_ago_do_not_count(strategy: Any, tmp_path: Path) -> None:
    """The fast worker ends when the bias is at 125; the slow one raises it to 200, half a step at a time."""
    groups = "".join(
        f"[[workers]]\ncount = 1\nstep_s = {seconds}\nup = '10gbit'\ndown = '10gbit'\nlatency_s = 0.0\n"
        for seconds in (0.01, 0.04)
    )
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(groups, encoding="utf-8")
    result = offbeat.simulate(
        model=Drifting(),
        loss=lambda model, batch: -model(batch[0]).mean(),
        data=(torch.zeros(64, 1),),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        strategy=strategy,
        cluster=cluster,
        batch_size=2,
        steps=200,
        work="equal",
    )
    assert result.model.bias.item() == pytest.approx(200, abs=2)
    assert (
        0 < (result.model.bias - result.model.norm.running_mean).item() < 10
    )  # a mean of both lags by some 40


def _in_turn(steps: int) -> tuple[Tensors, Tensors]:
    """Rank 0 makes three steps, then rank 1 its own. Return the rank's statistics, and the published."""
    rank = dist.get_rank()
    model = _model()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, ASP(), timeout_s=HANG_S) as sync:
        for turn in range(2):
            if turn == rank:
                loops.train(model, optimizer, loops.batches(rank, steps if rank else 3))
                sync.settle()
            dist.barrier()
        own = loops.tensors(model[0])
    return own, loops.tensors(model[0])


@pytest.mark.parametrize(("steps", "weight"), [(20, 1.0), (63, 0.9**21.5)])
def test_only_pushes_make_statistics_old(crew, steps: int, weight: float) -> None:
    """Rank 0 has seen 3 pushes, rank 1 all: half of its own per worker, of which 10 are tolerated."""
    (early, published), (late, _) = crew(2).run(_in_turn, steps)
    for name in NAMES:
        mean = (weight * early[name] + late[name]) / (weight + 1)
        torch.testing.assert_close(published[name], mean)
