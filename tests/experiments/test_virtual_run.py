"""An interrupt in virtual time comes in some worker's turn, seldom in that of the first, who is watched."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat import BSP, SSP
from offbeat.experiments.callbacks.jsonl import JsonLines
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.simulate import SimulationResult
from offbeat.experiments.tasks.base import Batch
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate, simulate_here
from offbeat.worlds.virtual.cluster import load_cluster
from offbeat.worlds.virtual.messages import REQUEST_BYTES

pytestmark = pytest.mark.virtual

WORKERS = 3
SERVED = """
[[workers]]
count = 2
step_s = 0.05
up = "100mbit"
down = "100mbit"

[server]
up = "100mbit"
down = "100mbit"
"""


@dataclass(frozen=True, kw_only=True)
class Interrupted(Quadratic):
    at: int = 0
    asked: list[None] = field(default_factory=list, compare=False)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        self.asked.append(None)
        if len(self.asked) == self.at:
            raise KeyboardInterrupt
        return super().gradient(model, batch)


class Closing(Callback):
    times = 0

    def closed(self) -> None:
        self.times += 1


@pytest.mark.parametrize("turn", range(1, 2 * WORKERS + 1))
def test_who_watches_is_told_at_once_in_whosever_turn_it_came(turn: int) -> None:
    watcher, task = Closing(), Interrupted(at=turn)
    job = Job(task=task, strategy=BSP(), workers=WORKERS, steps=5)
    with pytest.raises(KeyboardInterrupt) as caught:
        simulate(job, load_cluster("lan-1g"), task.load(None), lambda ledgers: [watcher])
    assert caught.traceback, "it is still being handled: nothing has been collected"
    assert watcher.times == 1


def test_the_bytes_of_a_dedicated_server_are_in_all_that_a_run_writes(tmp_path: Path) -> None:
    task, weights = Quadratic(dimension=1000, noise=0.0), 4 * 1008  # padded to 64 bytes
    target = 1e9  # reached at once
    job = Job(task=task, strategy=SSP(staleness=0), workers=2, steps=6, evaluate_every=2, target=target)
    (file := tmp_path / "served.toml").write_text(SERVED)
    log = JsonLines(tmp_path / "log.jsonl")
    summary = simulate_here(job, str(file), task.load(), tmp_path, lambda latest, hosts=dict: [log])
    sent, answered = 2 * (weights + REQUEST_BYTES), 2 * weights  # in a step, by the workers and to them
    expected = [(n * sent, n * answered, n * (sent + answered)) for n in (2, 4, 6)]
    names = ("bytes_sent", "bytes_server", "bytes_total")
    assert [tuple(point[name] for name in names) for point in summary["history"]] == expected
    assert tuple(summary[name] for name in names) == expected[-1]
    assert summary["bytes_to_target"] == expected[0][2]
    assert sum(worker["bytes_sent"] for worker in summary["per_worker"]) == expected[-1][0]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["bytes_total"] for line in lines if line["event"] == "evaluation"] == [
        e[2] for e in expected
    ]
    steps = [line for line in lines if line["event"] == "step"]
    assert sum(line["bytes_server"] for line in steps) == 6 * weights, "of rank 0"
    assert SimulationResult(nn.Linear(1, 1), summary).bytes_sent == expected[-1][2]


@pytest.mark.parametrize(("width", "threads"), [(10, 1), (1_000_000, 2)])
def test_small_models_are_simulated_with_one_thread(width: int, threads: int) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(torch.get_num_threads())
        return sum(param.sum() for param in model.parameters())  # type: ignore[return-value]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        offbeat.simulate(
            model=nn.Linear(width, 1),
            loss=loss,
            data=(torch.zeros(2, 1),),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            strategy=BSP(),
            workers=1,
            steps=1,
            batch_size=1,
            evaluate=lambda model: 0.0,
        )
        assert (seen[-1], torch.get_num_threads()) == (threads, 2)  # the first one is a check of the loss
    finally:
        torch.set_num_threads(before)
