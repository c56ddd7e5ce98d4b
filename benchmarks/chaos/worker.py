"""A worker: trains Fashion-MNIST at a given pace, notes every step, and evaluates at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import offbeat
from benchmarks.chaos.job import ALL, BATCH, LEAST, LR, TIMEOUT_S, WORKERS, Event, Job, write_whole
from offbeat.experiments.tasks import task


def make_task() -> Any:
    """Return the task of all trainings."""
    return task("fashion-mnist", model="mlp")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all trainings."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


@dataclass(frozen=True)
class Training:
    """What a library makes of a model and its optimizer."""

    clock: Callable[[], int]
    global_model: Callable[[], AbstractContextManager[None]]  # inside, the model has the weights to evaluate


@contextmanager
def attached(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Training]:
    """Train with one of our strategies."""
    strategy = ALL[job.strategy]
    sync = offbeat.attach(model, optimizer, strategy, elastic=job.elastic, timeout_s=TIMEOUT_S)
    yield Training(lambda: sync.clock, sync.consensus)
    sync.close(publish=False)


def _method(job: Job) -> Callable[..., AbstractContextManager[Training]]:
    if not job.peer:
        return attached
    from benchmarks.chaos.torchft_worker import managed  # which has libraries that we do not depend on

    return managed


def train(job: Job, slot: int, data: Any) -> None:
    """Train until the job is stopped; note every step, and write the final accuracy."""
    what = make_task()
    torch.manual_seed(0)
    model = what.build()
    optimizer = make_optimizer(model)
    order = torch.Generator().manual_seed(1000 * slot + int(time.time()) % 1000)
    own = torch.arange(slot, len(data), WORKERS)
    with _method(job)(job, model, optimizer) as training, job.log(slot).open("a", buffering=1) as log:
        log.write(Event(time.time(), "admitted", training.clock()).line())
        while not job.is_over(training.clock()):
            began_s = time.time()
            fraction, pace_s = job.read_progress()
            for group in optimizer.param_groups:
                group["lr"] = LR * max(LEAST, 1 - fraction)
            batch = data.batch(own[torch.randint(len(own), (BATCH,), generator=order)])
            optimizer.zero_grad()
            what.loss(model, batch).backward()
            time.sleep(max(0.0, began_s + pace_s - time.time()))
            optimizer.step()
            log.write(Event(time.time(), "step", training.clock()).line())
        with training.global_model():
            accuracy = what.evaluate(model, data)
        write_whole(job.result(slot), json.dumps(accuracy))
