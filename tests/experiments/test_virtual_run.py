"""An interrupt in virtual time comes in some worker's turn, seldom in that of the first, who is watched."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat import BSP
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.tasks.base import Batch
from offbeat.experiments.tasks.quadratic import Quadratic
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

pytestmark = pytest.mark.virtual

WORKERS = 3


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
