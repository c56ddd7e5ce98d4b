"""LocalSGD of Accelerate, used as its documentation shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from benchmarks.peers.training import RankSetup, Training, averaged_weights
from offbeat.experiments.tasks import Batch


@contextmanager
def local_sgd(setup: RankSetup) -> Iterator[Training]:
    """Train with Accelerate's LocalSGD."""
    accelerator = Accelerator(cpu=not next(setup.model.parameters()).is_cuda)
    model, optimizer = accelerator.prepare(setup.model, setup.optimizer)
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=setup.settings["steps"], enabled=True
    ) as local:
        if not local.enabled:
            raise RuntimeError(f"Accelerate finds no other workers: {accelerator.distributed_type}")

        def step(batch: Batch) -> None:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(setup.task.loss(model, batch))
                setup.task.clip(setup.model)
                optimizer.step()
                local.step()

        yield Training(step=step, global_model=lambda: averaged_weights(setup.model))
