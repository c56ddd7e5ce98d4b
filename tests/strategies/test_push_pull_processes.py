"""Served strategies over real processes: BSP where they must be, steady when ranks are lost."""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import ASP, BSP, DSSP, SSP
from offbeat.strategies.push_pull import PushPull
from offbeat.worlds.processes.emulation import pace
from offbeat.worlds.processes.server.channel import ShardChannel
from offbeat.worlds.processes.server.transport import ProcessServerClient
from tests.conformance import features
from tests.conformance.table import AnyStrategy
from tests.support import loops
from tests.support.allocations import recording_allocations
from tests.support.beside import lightly
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.lost import patched
from tests.support.server_ranks import (
    AT,
    STEPS,
    Hire,
    exact_run,
    exact_run_in_pieces,
    gone,
    server_pid,
    troubled_run,
)

pytestmark = pytest.mark.processes


# --- where it must be BSP


def _trained(strategy: AnyStrategy, optimizer: str) -> tuple[Tensor, Any]:
    model, metrics = loops.attached(dist.get_rank(), strategy, optimizer, STEPS)
    return loops.flat(model), metrics


@pytest.mark.parametrize(("world", "optimizer"), [(2, "sgd"), (2, "momentum"), (3, "momentum")])
def test_without_staleness_it_is_bsp(crew: Hire, world: int, optimizer: str) -> None:
    """Plain SGD alike; with momentum each worker has its own, and updates are linear in the gradients."""
    bsp = crew(world).run(_trained, BSP(), optimizer)
    ours = crew(world).run(_trained, SSP(staleness=0), optimizer)
    bound = 3 * world * STEPS * torch.finfo(torch.float32).eps * bsp[0][0].abs().max().item()
    for weights, metrics in ours:
        assert torch.equal(weights, ours[0][0])
        torch.testing.assert_close(weights, bsp[0][0], rtol=0, atol=bound)
        assert metrics.staleness == {"0": STEPS}
        assert metrics.sync_steps == metrics.steps == STEPS


@pytest.mark.parametrize(
    ("optimizer", "push"), [("momentum", "gradient"), ("adamw", "auto"), ("pair", "gradient")]
)
def test_with_gradients_it_is_bsp_under_any_optimizer(crew: Hire, optimizer: str, push: str) -> None:
    """Pushed gradients are averaged before the server steps. Updates are not BSP: one is told of that."""
    bsp = crew(2).run(_trained, BSP(), optimizer)
    ours = crew(2).run(_trained, SSP(staleness=0, push=push), optimizer)
    for weights, metrics in ours:
        torch.testing.assert_close(weights, bsp[0][0], rtol=0, atol=2e-6)
        assert metrics.staleness == {"0": STEPS}


def _warned(push: str) -> list[str]:
    """Return what this rank is told when it attaches."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("offbeat")
    log.addHandler(handler)
    try:
        model = loops.mlp()
        offbeat.attach(model, loops.adamw(model), SSP(staleness=0, push=push), timeout_s=HANG_S).close()
    finally:
        log.removeHandler(handler)
    return told


def test_attach_tells_rank_0_that_updates_of_adam_are_not_bsp(crew: Hire) -> None:
    (line,), others = crew(2).run(_warned, "update")
    assert line.startswith('ssp with push="update" and AdamW: ') and not others
    assert crew(2).run(_warned, "auto") == [[], []], "gradients are pushed"


def _plain() -> bool:
    alone, _ = loops.attached(0, SSP(staleness=0), "momentum", STEPS)
    plain = loops.mlp(0)
    loops.train(plain, loops.momentum(plain), loops.batches(0, STEPS))
    torch.testing.assert_close(loops.flat(alone), loops.flat(plain))
    return True


def test_a_world_of_one_is_the_plain_loop(crew: Hire) -> None:
    assert crew(1).run(_plain) == [True]


def _coming_late() -> int:
    """Rank 1 comes to the server when rank 0 has given it weights; how often anybody reads them."""
    rank, store, reads = dist.get_rank(), dist.distributed_c10d._get_default_store(), []
    model = loops.mlp(rank)
    with pytest.MonkeyPatch.context() as patch:
        make, pull = ShardChannel.__init__, ProcessServerClient.pull

        def late(self: ShardChannel, *args: Any) -> None:
            if rank == 1:
                store.wait(["rank 0 is attached"])
            make(self, *args)

        def counted(self: ProcessServerClient, *args: Any) -> Any:
            reads.append(args)
            return pull(self, *args)

        patch.setattr(ShardChannel, "__init__", late)
        patch.setattr(ProcessServerClient, "pull", counted)
        with offbeat.attach(model, loops.sgd(model), SSP(staleness=0), timeout_s=HANG_S):
            store.set(f"rank {rank} is attached", "")
            return len(reads)


def test_all_start_from_the_same_weights_whoever_comes_first(crew: Hire) -> None:
    """Who read the server's might have read the first update of another."""
    assert crew(2).run(lightly, _coming_late) == [0, 0]


# --- whatever the loop does


def _looks(feature: str, strategy: AnyStrategy) -> dict[str, Tensor]:
    net, metrics, _ = features.attached(feature, strategy, dist.get_rank(), STEPS)
    assert (metrics.steps, metrics.refused) == (STEPS, 0)
    return loops.tensors(net)


@pytest.mark.parametrize("feature", ["batch norm", "mixed dtypes", "clipping", "accumulation"])
def test_features(crew: Hire, feature: str) -> None:
    bsp = crew(2).run(_looks, feature, BSP())
    ours = crew(2).run(_looks, feature, SSP(staleness=0))
    trained = {name for name, _ in features.FEATURES[feature].model(0).named_parameters()}
    for name in trained:
        assert ours[0][name].isfinite().all()
        assert torch.equal(ours[0][name], ours[1][name]), "lock step, whatever was clipped"
        if feature in ("batch norm", "accumulation"):  # where a mean of updates is the update of the mean
            torch.testing.assert_close(ours[0][name], bsp[0][name])


def _consensus(strategy: AnyStrategy) -> list[dict[str, Tensor]]:
    """Look after every third step, while the others' pushes may be under way."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    looks = []
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:

        def look(step: int) -> None:
            if step % 3 == 0:
                before = loops.tensors(model)
                with sync.consensus():
                    looks.append(loops.tensors(model))
                assert loops.equal(before, loops.tensors(model))

        loops.train(model, optimizer, loops.batches(rank, STEPS), after_step=look)
    return looks


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=1), DSSP(low=1, high=4)], ids=str)
def test_all_hold_the_same_in_a_consensus(crew: Hire, strategy: AnyStrategy) -> None:
    ours, theirs = crew(2).run(_consensus, strategy)
    assert len(ours) == 4
    assert all(map(loops.equal, ours, theirs))


def _paced(strategy: PushPull, place: str) -> Any:
    rank, store = dist.get_rank(), dist.PrefixStore(place, dist.distributed_c10d._get_default_store())
    model = loops.mlp()
    optimizer = loops.sgd(model)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:

        def run_ahead(step: int) -> None:
            """Rank 1 stays at its first step until rank 0 is ahead as far as it always may be."""
            if (rank, step) == (0, 1 + strategy.slack):
                store.set("rank 0 is ahead", "")
            if (rank, step) == (1, 1):
                store.wait(["rank 0 is ahead"])

        pace(model, 0.01, factor=4.0 if rank == 1 else 1.0)
        loops.train(model, optimizer, loops.batches(rank, 20), after_step=run_ahead)
        return sync.metrics


@pytest.mark.parametrize(
    ("strategy", "bound"),
    [(SSP(staleness=2), 2), (SSP(staleness=2, overlap=False), 2), (DSSP(low=1, high=5), 5)],
    ids=str,
)
def test_staleness_keeps_its_bound(crew: Hire, strategy: PushPull, bound: int) -> None:
    fast, slow = crew(2).run(_paced, strategy, secrets.token_hex(8))
    assert strategy.slack <= fast.staleness_max <= bound, "it did run ahead"
    assert slow.staleness_max <= bound
    landed = 20 - strategy.overlaps  # the last one is under way
    assert sum(fast.staleness.values()) == sum(slow.staleness.values()) == landed


# --- stopped and resumed


@pytest.mark.parametrize("strategy", [SSP(staleness=0), SSP(staleness=1)], ids=str)
def test_resumed_in_lock_step_equals_never_stopped_to_the_bit(crew: Hire, strategy: AnyStrategy) -> None:
    """With what is under way; the server's weights as well as each worker's own."""
    straight = crew(2).run(lightly, exact_run, strategy, None)
    stopped = crew(2).run(lightly, exact_run, strategy, 6)
    for one, other in zip(straight, stopped, strict=True):
        assert torch.equal(one, other)
        assert bool((one != one.round()).any()), "it did go beyond whole numbers"


@pytest.mark.parametrize("strategy", [SSP(staleness=0), SSP(staleness=1)], ids=str)
def test_more_shards_on_each_host_train_the_same_to_the_bit(crew: Hire, strategy: AnyStrategy) -> None:
    """Also across a checkpoint. Of nine weights, the shards have one or two."""
    whole = crew(2).run(lightly, exact_run_in_pieces, 1, strategy, None)
    for stop in (None, 6):
        in_pieces = crew(2).run(lightly, exact_run_in_pieces, 3, strategy, stop)
        assert all(map(torch.equal, whole, in_pieces))


# --- memory


def _allocated() -> tuple[int, int]:
    """The most bytes that anything took anew in a step after the first few, and the bytes of the model."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(100, 300, bias=False), nn.Linear(300, 100, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(2, 100, generator=torch.Generator().manual_seed(rank))
    with offbeat.attach(model, optimizer, SSP(staleness=1), timeout_s=HANG_S):

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(data).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        with recording_allocations() as sizes:
            for _ in range(3):
                step()
    return max(sizes, default=0), sum(p.nbytes for p in model.parameters())


def test_a_steady_step_takes_no_memory_of_the_models_size(crew: Hire) -> None:
    """On the worker; tests/unit/test_doors.py looks at the server."""
    for largest, model in crew(2).run(lightly, _allocated):
        assert largest == model / 2, "a layer's gradient, which autograd makes before it is added"


# --- what is not finite


def _poisoned(strategy: AnyStrategy) -> tuple[Any, Tensor]:
    rank = dist.get_rank()
    model = loops.mlp()
    optimizer = loops.sgd(model)
    data = list(loops.batches(rank, STEPS))
    if rank == 1:
        data[AT] = (torch.full_like(data[AT][0], torch.nan), data[AT][1])
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        loops.train(model, optimizer, data)
        sync.settle()
        with sync.consensus():
            return sync.metrics, loops.flat(model)


@pytest.mark.parametrize("strategy", [ASP(), SSP(staleness=1), SSP(staleness=0)], ids=str)
def test_an_update_that_is_not_finite_is_refused(crew: Hire, strategy: AnyStrategy) -> None:
    (well, weights), (ill, there) = crew(2).run(_poisoned, strategy)
    assert (well.refused, ill.refused) == (0, 1)
    assert (well.steps, ill.steps) == (STEPS, STEPS)
    assert torch.equal(weights, there) and weights.isfinite().all()


# --- lost ranks; the server's process


@pytest.mark.parametrize(
    ("strategy", "trouble"),
    [(ASP(), "SIGKILL"), (SSP(staleness=1), "SIGKILL"), (SSP(staleness=0), "SIGSTOP")],
    ids=str,
)
def test_the_others_train_on_without_a_lost_rank(strategy: AnyStrategy, trouble: str) -> None:
    """The stopped one is forgotten after half of the timeout: longer than a port's patience."""
    crew = Crew(3)
    try:
        crew.start(patched, troubled_run, strategy, trouble, 1)
        for well, outcome in crew.outcomes([0, 2]):
            assert well, outcome
            steps, nothing_left, told = outcome
            assert steps == STEPS
            assert "but rank 1 has not" in told, "closing tells who is missing, and nobody else"
            assert nothing_left, "and takes the server along all the same, with its snapshot"
    finally:
        crew.dismiss()


def _left_behind(strategy: AnyStrategy) -> int | None:
    model = loops.mlp()
    return server_pid(offbeat.attach(model, loops.sgd(model), strategy, timeout_s=HANG_S))


def ends(pid: int) -> bool:
    """Whether a process ends by itself."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended
        return True
    try:
        return bool(select.select([handle], [], [], HANG_S)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize("world", [1, 2])
def test_the_server_ends_when_nobody_is_left(world: int) -> None:
    crew = Crew(world)
    try:
        pid = crew.run(_left_behind, ASP())[0]
        assert pid and not gone(pid)
        for process in crew.processes:
            process.kill()
        assert ends(pid)
    finally:
        crew.dismiss()


def _closed(strategy: AnyStrategy, fails: bool) -> bool:
    model = loops.mlp()
    sync = offbeat.attach(model, loops.sgd(model), strategy, timeout_s=HANG_S)
    pid = server_pid(sync)
    sync.close(ValueError("out of coffee") if fails else None)
    return pid is None or gone(pid) or (fails and ends(pid))


@pytest.mark.parametrize("fails", [False, True])
def test_closing_ends_the_server(crew: Hire, fails: bool) -> None:
    assert crew(2).run(_closed, ASP(), fails) == [True, True]


def test_the_command_line(tmp_path: Path) -> None:
    """After the first of two epochs rank 0 evaluates alone."""
    command = ["train", "digits", "--strategy", "ssp", "--workers", "2", "--epochs", "2", "--out"]
    subprocess.run([sys.executable, "-m", "offbeat", *command, str(tmp_path)], check=True, timeout=HANG_S)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"] and summary["strategy"] == "ssp"
    for entry in summary["per_worker"]:
        assert entry["staleness_max"] <= 3
        assert sum(entry["staleness"].values()) == entry["steps"]
    assert summary["work"] == "shared"  # so ranks may make unequally many steps


def _unequal(steps: tuple[int, ...]) -> int:
    rank = dist.get_rank()
    _, metrics = loops.attached(rank, SSP(staleness=1), "sgd", steps[rank])
    taken: int = metrics.steps
    return taken


def test_one_whose_loop_ends_early_keeps_nobody_waiting(crew: Hire) -> None:
    """It leaves the server when it ends, not when all have ended: those are bound to its clock until then."""
    assert crew(3).run(_unequal, (3, 12, 12)) == [3, 12, 12]
