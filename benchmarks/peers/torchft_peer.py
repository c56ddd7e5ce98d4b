"""torchft's LocalSGD and DiLoCo. Each host is a replica group of one; the lighthouse runs on host 0.

All start from the same seed, so the first weights need not be copied (`init_sync=False`, as its documentation
advises). Its quorum is asked for at each synchronization: the lighthouse looks after it every 10 ms here,
where 100 is its own default.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.peers.training import Bench, Training, averaged, showing

LIGHTHOUSE_PORT = 29400
QUORUM_TICK_MS = 10
TIMEOUT = timedelta(seconds=120)


def address(rank: int) -> str:
    network, _, first = os.environ["MASTER_ADDR"].rpartition(".")
    return f"{network}.{int(first) + rank}"


@contextmanager
def managed(bench: Bench) -> Iterator[Manager]:
    logging.disable(logging.INFO)  # several lines a synchronization
    lighthouse = None
    if bench.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=bench.world, quorum_tick_ms=QUORUM_TICK_MS
        )
    dist.barrier()
    own = address(bench.rank)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=bench.model.load_state_dict,
        state_dict=bench.model.state_dict,
        min_replica_size=bench.world,
        use_async_quorum=False,  # DiLoCo demands it
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
        replica_id=f"host_{bench.rank}",
        hostname=own,
        init_sync=False,
    )
    try:
        yield manager
        dist.barrier()
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


@contextmanager
def local_sgd(bench: Bench) -> Iterator[Training]:
    with (
        managed(bench) as manager,
        LocalSGD(manager, bench.model, bench.optimizer, sync_every=bench.settings["sync_every"]),
    ):
        yield Training(
            step=lambda batch: bench.step(bench.model, bench.optimizer, batch),
            looking=lambda: averaged(bench.model),
        )


@contextmanager
def diloco(bench: Bench) -> Iterator[Training]:
    outer = torch.optim.SGD(
        bench.model.parameters(), lr=bench.settings["outer_lr"], momentum=0.9, nesterov=True
    )
    with (
        managed(bench) as manager,
        DiLoCo(
            manager,
            [bench.model],
            bench.optimizer,
            outer,
            sync_every=bench.settings["sync_every"],
            backup_device=torch.device("cpu"),
            pin_memory=False,
            use_bucketization=True,
        ) as work,
    ):
        fragment = work._fragments[0]

        def global_model() -> list[torch.Tensor]:
            return [fragment.original_parameters[name] for name, _ in bench.model.named_parameters()]

        yield Training(
            step=lambda batch: bench.step(bench.model, bench.optimizer, batch),
            looking=lambda: showing(bench.model, global_model()),
        )
