"""LocalSGD and DiLoCo of torchft. Each host is a replica group of one; the lighthouse runs on host 0.

All ranks start from the same seed, so the first weights need not be copied (`init_sync=False`, as torchft's
documentation advises). Each synchronization asks for a quorum; the lighthouse checks it every 10 ms here,
instead of every 100 ms, its default.
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

from benchmarks.peers.training import RankSetup, Training, averaged_weights, temporary_weights

LIGHTHOUSE_PORT = 29400
QUORUM_TICK_MS = 10
TIMEOUT = timedelta(seconds=120)


def address(rank: int) -> str:
    """Return the address of a rank's host."""
    network, _, first = os.environ["MASTER_ADDR"].rpartition(".")
    return f"{network}.{int(first) + rank}"


@contextmanager
def managed(setup: RankSetup) -> Iterator[Manager]:
    """Start this rank's torchft manager, and on rank 0 the lighthouse."""
    logging.disable(logging.INFO)  # several lines per synchronization
    lighthouse = None
    if setup.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=setup.world, quorum_tick_ms=QUORUM_TICK_MS
        )
    dist.barrier()
    own = address(setup.rank)
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=setup.model.load_state_dict,
        state_dict=setup.model.state_dict,
        min_replica_size=setup.world,
        use_async_quorum=False,  # DiLoCo requires it
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
        replica_id=f"host_{setup.rank}",
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
def local_sgd(setup: RankSetup) -> Iterator[Training]:
    """Train with torchft's LocalSGD."""
    with (
        managed(setup) as manager,
        LocalSGD(manager, setup.model, setup.optimizer, sync_every=setup.settings["sync_every"]),
    ):
        yield Training(
            step=lambda batch: setup.step(setup.model, [setup.optimizer], batch),
            global_model=lambda: averaged_weights(setup.model),
        )


@contextmanager
def diloco(setup: RankSetup) -> Iterator[Training]:
    """Train with torchft's DiLoCo."""
    outer = torch.optim.SGD(
        setup.model.parameters(), lr=setup.settings["outer_lr"], momentum=0.9, nesterov=True
    )
    with (
        managed(setup) as manager,
        DiLoCo(
            manager,
            [setup.model],
            setup.optimizer,
            outer,
            sync_every=setup.settings["sync_every"],
            backup_device=torch.device("cpu"),
            pin_memory=False,
            use_bucketization=True,
        ) as diloco_,
    ):
        fragment = diloco_._fragments[0]

        def global_model() -> list[torch.Tensor]:
            return [fragment.original_parameters[name] for name, _ in setup.model.named_parameters()]

        yield Training(
            step=lambda batch: setup.step(setup.model, [setup.optimizer], batch),
            global_model=lambda: temporary_weights(setup.model, global_model()),
        )
