"""Rendezvous: find the other ranks, check that all ranks train the same thing, and open a port to them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.core.port import Lane
from offbeat.errors import LaunchError, MismatchError, RankLost
from offbeat.worlds.processes.emulation import Shaper
from offbeat.worlds.processes.failure import FailureDetector
from offbeat.worlds.processes.hosts import Hosts, host_number
from offbeat.worlds.processes.interface import choose_interface
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

# Ranks of a group attach in the same order, so they give the same number to the same attachment.
_attachments: Counter[tuple[int, ...]] = Counter()


def connect_group(
    device: torch.device,
    fingerprint: Fingerprint,
    timeout_s: float,
    bits_per_s: float | None = None,
    ranks: tuple[int, ...] = (),
) -> ProcessPort:
    """Connect to the other ranks, in the user's process group or in one made from the environment.

    `fingerprint` describes what this rank is about to train; if ranks differ, the error names the difference.
    `ranks` are the global ranks to connect to, this one among them; by default all.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise LaunchError(HOW_TO_LAUNCH.format(script=Path(sys.argv[0]).name or "train.py"))
        _make_group("nccl" if device.type == "cuda" else "gloo", timeout_s)
    watch_launcher()
    _attachments[ranks] += 1
    names = ranks or range(dist.get_world_size())
    rank, world = names.index(dist.get_rank()), len(names)
    store = DeadlineStore(dist.PrefixStore(_prefix(ranks), _get_default_store()), timeout_s)
    groups, hosts = {}, None
    if world > 1:
        check_fingerprints(store, rank, world, fingerprint, timeout_s, names)
        store.set(f"host_number/{rank}", str(host_number(names[rank], emulated=bits_per_s is not None)))
        groups = _make_lanes(store, rank, ranks, names, timeout_s)  # all ranks have told their hosts now
        hosts = Hosts(rank, [int(store.get(f"host_number/{k}")) for k in range(world)])
    ledger = SharedLedger(rank, time.monotonic)
    shaper = Shaper(bits_per_s, ledger) if bits_per_s else None
    failures = FailureDetector(store, rank, world, names, timeout_s)
    return ProcessPort(groups, failures, ledger, timeout_s, shaper, hosts=hosts)


def _make_lanes(
    store: DeadlineStore, rank: int, ranks: tuple[int, ...], names: Sequence[int], timeout_s: float
) -> dict[Lane, dist.ProcessGroup]:
    """Make a group for each lane, and wait until all ranks have.

    A rank that went on at once, failed and closed its groups would break the connections of a slower one.
    """
    # The backend's own limit comes after ours, so that the error that users see names a rank.
    limit = timedelta(seconds=2 * timeout_s + 60)
    problem = ""
    try:
        groups = {
            lane: new_named_group(f"{_prefix(ranks)}/{lane.value}", ranks, limit)
            if ranks
            else dist.new_group(timeout=limit)
            for lane in Lane
        }
    except RuntimeError as failed:  # torch's errors of networks
        problem = str(failed).splitlines()[0]
    store.set(f"connected/{rank}", problem)
    for name, found in zip(
        names, _collect(store, "connected", range(len(names)), timeout_s, names, "connect"), strict=True
    ):
        if found:
            raise RankLost(f"rank {name} could not connect to the others: {found}")
    return groups


def _prefix(ranks: tuple[int, ...]) -> str:
    """Return where the latest attachment of these ranks keeps its entries in the store."""
    group = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16] + "/" if ranks else ""
    return f"offbeat/{group}{_attachments[ranks]}"


def new_named_group(name: str, ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group of these ranks; no other rank needs to call this.

    As `new_group(use_local_synchronization=True)`, which however names a group by the number of groups that a
    rank has: ranks with different numbers of groups would wait for each other forever.
    """
    store, backend = _get_default_store(), dist.get_backend()
    make: Any = distributed_c10d._new_process_group_helper
    group, _ = make(len(ranks), ranks.index(dist.get_rank()), [*ranks], backend, store, name, timeout=timeout)
    made: dist.ProcessGroup = group
    places = {rank: place for place, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = places
    return made


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
    failures = FailureDetector(store, rank, workers, timeout_s=timeout_s)
    return ProcessPort({}, failures, ledger, timeout_s, shaper, lease)


def _make_group(backend: str, timeout_s: float) -> None:
    """Make the process group that the environment describes."""
    if os.environ.get("WORLD_SIZE") == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(f"RANK is set, but {' and '.join(missing)} is not: a launcher sets all of them")
    host, tcp_port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if tcp_port.isdecimal():
        choose_interface(host, int(tcp_port))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as failed:  # torch's errors of stores and networks
        why = str(failed).splitlines()[0]
        raise LaunchError(
            f"the ranks did not meet at {host}:{tcp_port} within {timeout_s:.0f} s: {why}"
        ) from failed


def destroy_group() -> None:
    """Destroy torch's process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_fingerprints(
    store: dist.Store | DeadlineStore,
    rank: int,
    world: int,
    fingerprint: Fingerprint,
    timeout_s: float,
    names: Sequence[int] = (),
) -> None:
    """Raise MismatchError on every rank if the ranks are not about to train the same thing."""
    store = DeadlineStore.of(store, timeout_s)
    names = names or range(world)
    store.set(f"fingerprint/{rank}", json.dumps(fingerprint))
    first: Fingerprint = json.loads(_collect(store, "fingerprint", [0], timeout_s, names)[0])
    store.set(f"difference/{rank}", difference(first, fingerprint, names[0]))
    differences = _collect(store, "difference", range(world), timeout_s, names)
    for other, found in enumerate(differences):
        if found:
            raise MismatchError(f"rank {names[other]} does not train what rank {names[0]} trains: {found}")


def difference(first: Fingerprint, other: Fingerprint, first_rank: int = 0) -> str:
    """Describe the first three entries in which two fingerprints differ; empty if they are equal."""
    lines = [
        f"{key} is {other.get(key, 'absent')} there, {first.get(key, 'absent')} on rank {first_rank}"
        for key in [*first, *(k for k in other if k not in first)]
        if first.get(key) != other.get(key)
    ]
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more


def _collect(
    store: DeadlineStore,
    name: str,
    ranks: Sequence[int],
    timeout_s: float,
    names: Sequence[int],
    duty: str = "call offbeat.attach()",
) -> list[str]:
    """Return the entry `name` of each of these ranks; raise RankLost if one is missing at the timeout."""
    keys = [f"{name}/{rank}" for rank in ranks]
    if not store.wait(keys, timeout_s):
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        named = ", ".join(str(names[rank]) for rank in missing)
        raise RankLost(f"rank {named} did not {duty} within {timeout_s:.0f} s")
    return [store.get(key).decode() for key in keys]
