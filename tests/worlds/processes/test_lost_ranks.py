"""Ranks that die, stop, raise or leave: the others are told which one, and nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest
import torch.distributed as dist

import offbeat
from offbeat import BSP, LocalSGD
from tests.support import loops
from tests.support.crew import Crew
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.lost import patched, wait_for_all_but
from tests.support.ports import free_port
from tests.support.python import Python

pytestmark = pytest.mark.processes

STRATEGIES = [BSP(), LocalSGD(period=2)]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEPS, AT = 12, 5
Told = tuple[bool, Any]


def _troubled(strategy: Any, trouble: str, who: int, patch: pytest.MonkeyPatch) -> None:
    rank = dist.get_rank()
    model = loops.mlp()
    optimizer = loops.sgd(model)

    def strike(step: int) -> None:
        if (rank, step) == (who, AT) and trouble == "raise":
            raise ValueError("out of coffee")
        if (rank, step) == (who, AT) and trouble in SIGNALS:
            os.kill(os.getpid(), SIGNALS[trouble])
        if step == AT and trouble in SIGNALS:
            sync.port.timeout_s = SILENCE_S  # from here on the other one takes part in nothing

    if trouble in SIGNALS:
        wait_for_all_but(who, patch)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S) as sync:
        ends = AT if (trouble, who) == ("end", rank) else STEPS
        loops.train(model, optimizer, loops.batches(rank, ends), after_step=strike)


def _expect_loss(told: Told, *words: str) -> None:
    well, value = told
    assert not well
    name, message, _ = value
    assert name == "RankLost"
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("trouble", "strategy", "others"), [("kill", BSP(), [0, 2]), ("stop", LocalSGD(period=2), [0])], ids=str
)
def test_rank_that_falls_silent(trouble: str, strategy: Any, others: list[int]) -> None:
    crew = Crew(1 + len(others))
    try:
        crew.start(patched, _troubled, strategy, trouble, 1)
        for told in crew.outcomes(others):
            _expect_loss(told, "rank 1 is gone or stuck")
            assert not any(f"rank {rank} is" in told[1][1] for rank in others)
    finally:
        crew.dismiss()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_rank_that_raises(crew, strategy: Any) -> None:
    crew(2).start(patched, _troubled, strategy, "raise", 1)
    witness, culprit = crew(2).outcomes()
    assert culprit[1][:2] == ("ValueError", "out of coffee")
    _expect_loss(witness, "rank 1 failed: ValueError: out of coffee", "seen by rank 0")


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("who", [0, 1])
def test_rank_whose_loop_ends_early(crew, strategy: Any, who: int) -> None:
    crew(2).start(patched, _troubled, strategy, "end", who)
    told = crew(2).outcomes()
    _expect_loss(told[1 - who], f"rank {who} ended its loop early", "same number of batches")
    _expect_loss(
        told[who], f"rank {who} has ended its loop, but rank {1 - who} has not", "same number of batches"
    )


# --- without a process group of the user's


SCRIPT = f"""
import os, signal, torch, offbeat
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer, offbeat.BSP(), timeout_s={HANG_S}) as sync:
    for step in range(6):
        if os.environ["RANK"] == os.environ.get("KILLED") and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print(sync.metrics.steps, "steps")
print("group left over:", torch.distributed.is_initialized())
"""


def _launch(**environment: str) -> subprocess.Popen[str]:
    ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in ours}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return Python("-c", SCRIPT, env={**env, **environment}, **pipes)


def test_no_group_and_no_launcher() -> None:
    process = _launch()
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode != 0
    assert "LaunchError" in said
    assert "torchrun --nproc-per-node" in said


def test_world_of_one_from_the_environment() -> None:
    process = _launch(RANK="0", WORLD_SIZE="1")
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, said
    assert "6 steps" in said
    assert "group left over: False" in said


@pytest.mark.parametrize(
    ("killed", "told"),
    [(0, "the rank that holds the rendezvous store is gone"), (1, "rank 1 is gone or stuck")],
)
def test_a_rank_that_is_killed_is_told_and_the_other_is_not_aborted(killed: int, told: str) -> None:
    """The other rank ends with that error: no thread of gloo aborts it ("terminate called …")."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting = {"WORLD_SIZE": "2", **place, "KILLED": str(killed)}
    ranks = [_launch(RANK=str(rank), **meeting) for rank in range(2)]
    said, _ = ranks[1 - killed].communicate(timeout=HANG_S)
    ranks[killed].communicate(timeout=HANG_S)
    assert ranks[killed].returncode == -signal.SIGKILL
    assert "RankLost" in said
    assert told in said
    assert ranks[1 - killed].returncode == 1, said
    assert "terminate called" not in said
