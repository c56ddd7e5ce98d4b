"""torchft's LocalSGD and DiLoCo under the same kills: each worker is a replica group of one.

A worker that returns heals at its first synchronization: it gets the weights and states of another replica.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.chaos.job import STRATEGIES, TIMEOUT_S, Job
from benchmarks.chaos.worker import Training
from offbeat.worlds.processes.server.bootstrap import parse_address

LIMIT = timedelta(seconds=TIMEOUT_S)
# Only the neighbours of a dead worker notice it at once: the others wait for the whole limit of an exchange.
# The longest round here takes 1.6 s; torchft's default is 60 s.
EXCHANGE = timedelta(seconds=5)


@contextmanager
def managed(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Training]:
    """Train with torchft's method of this job, with the settings of ours of that name."""
    logging.disable(logging.INFO)  # several lines per synchronization
    own = _own_address(job)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=EXCHANGE),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,  # DiLoCo requires it
        timeout=EXCHANGE,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{job.address}",
        replica_id=f"worker_{os.getpid()}_",
        hostname=own,
        init_sync=False,
    )
    with _method(job, manager, model, optimizer):
        yield Training(manager.current_step, nullcontext)
    manager.shutdown(wait=False)


def _method(job: Job, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    ours = STRATEGIES[job.strategy.removeprefix("torchft_")]
    if job.strategy == "torchft_local_sgd":
        return LocalSGD(manager, model, optimizer, sync_every=ours.period)
    outer = torch.optim.SGD(model.parameters(), lr=ours.outer_lr, momentum=ours.outer_momentum, nesterov=True)
    return DiLoCo(
        manager,
        [model],
        optimizer,
        outer,
        sync_every=ours.period,
        backup_device=torch.device("cpu"),
        pin_memory=False,
        use_bucketization=True,
    )


def _own_address(job: Job) -> str:
    """Return this host's address on the route to the lighthouse. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(parse_address(job.address))
        return str(probe.getsockname()[0])
