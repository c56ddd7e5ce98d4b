"""Simulation of a user's own model: what a strategy would cost on a cluster, before paying for it.

result = offbeat.simulate(
    model=nn.Linear(8, 1),
    loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
    data=(inputs, targets),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    strategy=offbeat.LocalSGD(period=8),
    cluster="slow-lan",
)
print(result.seconds, result.bytes_sent, result.value)
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.ledger import WorkerTotals
from offbeat.core.strategy import Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.summary import Summary
from offbeat.experiments.tasks.own import OwnTask, Workload
from offbeat.experiments.virtual_run import simulate_here
from offbeat.worlds.virtual.cluster import Cluster, load_cluster


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation. `summary` is the content of summary.json; all seconds are virtual."""

    model: nn.Module  # a copy with the trained weights, those that the last evaluation saw
    summary: Summary

    @property
    def seconds(self) -> float:
        """Seconds that the training would take on the cluster."""
        return float(self.summary["seconds"])

    @property
    def seconds_to_target(self) -> float | None:
        """Seconds until an evaluation reached the target; None if none did, or there was no target."""
        seconds: float | None = self.summary["seconds_to_target"]
        return seconds

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers, and a server on machines of its own, would send."""
        return int(self.summary["bytes_total"])

    @property
    def value(self) -> float | None:
        """The metric after the last step; None if it is not a finite number."""
        value: float | None = self.summary["value"]
        return value

    @property
    def history(self) -> list[dict[str, Any]]:
        """The evaluations: step, seconds, loss, value and bytes of each, as in summary.json."""
        history: list[dict[str, Any]] = self.summary["history"]
        return history


def simulate(
    *,
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    data: Any,
    optimizer: Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]],
    strategy: Strategy[Any],
    cluster: str | Path | Cluster = "lan-1g",
    workers: int | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    higher_is_better: bool = True,
    batch_size: int = 32,
    epochs: int = 10,
    steps: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    max_norm: float | None = None,
    step_s: float | None = None,
    seed: int = 0,
    evaluate_every: int | None = None,
    work: str | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    device: torch.device | str = "cpu",
    elastic: bool = False,
    minimum: int = 1,
) -> SimulationResult:
    """Train your own model on a virtual cluster: real gradients, and the seconds that the cluster would take.

    model             an nn.Module, which is copied for each worker and itself not changed, or a function that
                      builds one; only the weights of a function's model depend on the seed
    loss              a function of the model and a batch that returns the mean loss of the batch
    data              a tuple of tensors of one length, or a map-style data set; each worker gets its part
    optimizer         a function of the list of parameters that returns a torch optimizer, or a list of them
    strategy          how workers synchronize, such as `offbeat.LocalSGD(period=8)`
    cluster           a preset, the path of a cluster file, or a Cluster: see docs/virtual.md
    workers           number of workers; None: as many as the cluster has
    evaluate          a function of the model that returns the metric, which is named after the function. The
                      model is in evaluation mode, without gradients. None: the mean loss over `data`
    higher_is_better  whether a higher value of `evaluate` is better
    batch_size        samples per worker and step
    epochs            passes over the data
    steps             steps of each worker, instead of epochs; of shared work, on average
    collate           makes a batch of a list of samples, as `collate_fn` of a DataLoader
    max_norm          norm to which gradients are clipped
    step_s            seconds of one step of the cluster's first worker, with this model and batch size; other
                      workers keep their proportion to it. None: step times are those of the cluster
    seed              seed of the order of the data, of dropout and other draws, and of random step times
    evaluate_every    steps from one evaluation to the next; None: an epoch
    work              "shared": fast workers do more of the batches; "equal": each does equally many. None:
                      shared, if the strategy does not move in step
    target            value to reach; `seconds_to_target` of the result is the time of it
    out               folder for summary.json and details.json, for `offbeat report`; files there are replaced
    device            device that computes the gradients of all workers
    elastic           go on without workers that the cluster says to be away, hung or cut off, and admit them
                      again; see docs/elastic.md
    minimum           with elastic, the number of workers below which those that are left stop, with an error
    """
    workload = Workload(
        model=model,
        loss=loss,
        data=data,
        optimizer=optimizer,
        evaluate=evaluate,
        higher_is_better=higher_is_better,
        batch_size=batch_size,
        epochs=epochs,
        collate=collate,
        max_norm=max_norm,
        step_s=step_s,
    )
    described = load_cluster(cluster)
    job = Job(
        task=OwnTask(workload=workload, batch_size=batch_size, epochs=epochs),
        strategy=strategy,
        workers=described.size if workers is None else workers,
        seed=seed,
        steps=steps,
        evaluate_every=evaluate_every,
        work=work,
        target=target,
    )
    last = LastModel()

    def make_callbacks(
        latest: Callable[[], list[WorkerTotals]], hosts: Callable[[], dict[int, str]] = dict
    ) -> list[Callback]:
        return [last]

    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices()))
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out
        samples = job.task.load().to(device)
        summary = simulate_here(
            job, cluster, samples, Path(folder), make_callbacks, device, minimum=minimum if elastic else None
        )
    return SimulationResult(last.model, summary)


class LastModel(Callback):
    """A copy of the model as the last evaluation sees it: workers may differ between synchronizations."""

    model: nn.Module

    def started(self, job: Job, total_steps: int) -> None:
        self._total_steps = total_steps

    def published(self, step: int, model: nn.Module) -> None:
        if step == self._total_steps:
            self.model = copy.deepcopy(model)


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
