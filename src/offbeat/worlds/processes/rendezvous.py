"""Rendezvous: find the other ranks, check that all ranks train the same thing, and open a port to them."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.core.port import Lane
from offbeat.errors import LaunchError, MismatchError, RankLost
from offbeat.worlds.processes.emulation import Shaper
from offbeat.worlds.processes.failure import FailureDetector
from offbeat.worlds.processes.ledger import SharedLedger
from offbeat.worlds.processes.orphan import watch_launcher
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.server.rank_lease import RankLease
from offbeat.worlds.processes.store import DeadlineStore

HOW_TO_LAUNCH = """\
there is no process group, and RANK is not set, so this process knows of no other ranks.
Start the script with torch's launcher:
    torchrun --nproc-per-node 4 {script}    four workers on this machine
    torchrun --nproc-per-node 1 {script}    one worker, to try the script
or call torch.distributed.init_process_group() before offbeat.attach()."""

Fingerprint = dict[str, str]

_attachments = 0  # ranks attach in the same order, so they give the same number to the same attachment


def connect_group(
    device: torch.device, fingerprint: Fingerprint, timeout_s: float, bits_per_s: float | None = None
) -> ProcessPort:
    """Connect to the other ranks, in the user's process group or in one made from the environment.

    `fingerprint` describes what this rank is about to train; if ranks differ, the error names the difference.
    """
    global _attachments
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise LaunchError(HOW_TO_LAUNCH.format(script=Path(sys.argv[0]).name or "train.py"))
        _make_group("nccl" if device.type == "cuda" else "gloo", timeout_s)
    watch_launcher()
    _attachments += 1
    rank, world = dist.get_rank(), dist.get_world_size()
    store = DeadlineStore(dist.PrefixStore(f"offbeat/{_attachments}", _get_default_store()), timeout_s)
    groups = {}
    if world > 1:
        check_fingerprints(store, rank, world, fingerprint, timeout_s)
        # The backend's own limit comes after ours, so that the error that users see names a rank.
        limit = timedelta(seconds=2 * timeout_s + 60)
        groups = {lane: dist.new_group(timeout=limit) for lane in Lane}
    ledger = SharedLedger(rank, time.monotonic)
    shaper = Shaper(bits_per_s, ledger) if bits_per_s else None
    failures = FailureDetector(store, rank, world, timeout_s)
    return ProcessPort(groups, failures, ledger, timeout_s, shaper)


def connect_standalone(
    store: dist.Store | DeadlineStore,
    worker: int,
    workers: int,
    timeout_s: float,
    bits_per_s: float | None = None,
) -> ProcessPort:
    """Open a port to a dedicated server for a worker without a process group."""
    lease = RankLease(DeadlineStore.of(store, timeout_s), worker, workers)
    rank = lease.rank  # selects the worker's chunk of the data
    ledger = SharedLedger(rank, time.monotonic)
    shaper = Shaper(bits_per_s, ledger) if bits_per_s else None
    failures = FailureDetector(store, rank, workers, timeout_s)
    return ProcessPort({}, failures, ledger, timeout_s, shaper, lease)


def _make_group(backend: str, timeout_s: float) -> None:
    """Make the process group that the environment describes."""
    if os.environ.get("WORLD_SIZE") == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(f"RANK is set, but {' and '.join(missing)} is not: a launcher sets all of them")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as failed:  # torch's errors of stores and networks
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = str(failed).splitlines()[0]
        raise LaunchError(f"the ranks did not meet at {where} within {timeout_s:.0f} s: {why}") from failed


def check_fingerprints(
    store: dist.Store | DeadlineStore, rank: int, world: int, fingerprint: Fingerprint, timeout_s: float
) -> None:
    """Raise MismatchError on every rank if the ranks are not about to train the same thing."""
    store = DeadlineStore.of(store, timeout_s)
    store.set(f"fingerprint/{rank}", json.dumps(fingerprint))
    first: Fingerprint = json.loads(_collect(store, "fingerprint", [0], timeout_s)[0])
    store.set(f"difference/{rank}", difference(first, fingerprint))
    differences = _collect(store, "difference", range(world), timeout_s)
    for other, found in enumerate(differences):
        if found:
            raise MismatchError(f"rank {other} does not train what rank 0 trains: {found}")


def difference(first: Fingerprint, other: Fingerprint) -> str:
    """Describe the first three entries in which two fingerprints differ; empty if they are equal."""
    lines = [
        f"{key} is {other.get(key, 'absent')} there, {first.get(key, 'absent')} on rank 0"
        for key in [*first, *(k for k in other if k not in first)]
        if first.get(key) != other.get(key)
    ]
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more


def _collect(store: DeadlineStore, name: str, ranks: list[int] | range, timeout_s: float) -> list[str]:
    """Return the entry `name` of each of these ranks; raise RankLost if one is missing at the timeout."""
    keys = [f"{name}/{rank}" for rank in ranks]
    if not store.wait(keys, timeout_s):
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        named = ", ".join(map(str, missing))
        raise RankLost(f"rank {named} did not call offbeat.attach() within {timeout_s:.0f} s")
    return [store.get(key).decode() for key in keys]
