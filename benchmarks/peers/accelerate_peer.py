"""Accelerate's LocalSGD, as its documentation shows it: all prepared, one step of it a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from benchmarks.peers.training import Bench, Training, averaged
from offbeat.experiments.tasks import Batch


@contextmanager
def local_sgd(bench: Bench) -> Iterator[Training]:
    accelerator = Accelerator(cpu=not next(bench.model.parameters()).is_cuda)
    model, optimizer = accelerator.prepare(bench.model, bench.optimizer)
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=bench.settings["steps"], enabled=True
    ) as local:
        if not local.enabled:
            raise RuntimeError(f"Accelerate sees no other workers: {accelerator.distributed_type}")

        def step(batch: Batch) -> None:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(bench.task.loss(model, batch))
                bench.task.clip(bench.model)
                optimizer.step()
                local.step()

        yield Training(step=step, looking=lambda: averaged(bench.model))
