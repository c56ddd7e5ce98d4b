"""Joining: from whatever started this process to a port that reaches the other ranks."""

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
from offbeat.worlds.processes.port import ProcessPort

HOW_TO_LAUNCH = """\
there is no process group, and RANK is not set, so this process does not know of any others.
Start the script with torch's launcher:
    torchrun --nproc-per-node 4 {script}    four workers on this machine
    torchrun --nproc-per-node 1 {script}    one worker, to try the script
or call torch.distributed.init_process_group() before offbeat.attach()."""

Fingerprint = dict[str, str]

_attachments = 0  # ranks attach in the same order, so they give the same number to the same attachment


def connect_group(
    device: torch.device, description: Fingerprint, timeout_s: float, bits_per_s: float | None = None
) -> ProcessPort:
    """Meet the other ranks, in the process group the user has or in one made from the environment.

    `description` says what this rank is about to train; ranks that disagree are told where.
    """
    global _attachments
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise LaunchError(HOW_TO_LAUNCH.format(script=Path(sys.argv[0]).name or "train.py"))
        _make_group("nccl" if device.type == "cuda" else "gloo", timeout_s)
    _attachments += 1
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"offbeat/{_attachments}", _get_default_store())
    groups = {}
    if world > 1:
        compare(store, rank, world, description, timeout_s)
        # The backend's own limit comes after ours, so that the error is the one that names a rank.
        limit = timedelta(seconds=2 * timeout_s + 60)
        groups = {lane: dist.new_group(timeout=limit) for lane in Lane}
    ledger = SharedLedger(rank, time.monotonic)
    shaper = Shaper(bits_per_s, ledger) if bits_per_s else None
    return ProcessPort(groups, FailureDetector(store, rank, world), ledger, timeout_s, shaper)


def connect_standalone(
    desk_store: dist.Store, worker: int, workers: int, timeout_s: float, bits_per_s: float | None = None
) -> ProcessPort:
    """A port to a dedicated server, for a worker that came by itself: there is no process group."""
    rank = worker % workers  # the part of the data that it is to look at
    ledger = SharedLedger(rank, time.monotonic)
    shaper = Shaper(bits_per_s, ledger) if bits_per_s else None
    return ProcessPort({}, FailureDetector(desk_store, rank, workers), ledger, timeout_s, shaper, lone=True)


def _make_group(backend: str, timeout_s: float) -> None:
    """Make the process group that the environment describes."""
    if os.environ.get("WORLD_SIZE") == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LaunchError(f"RANK is set, but {' and '.join(missing)} is not: a launcher sets all of them")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def compare(store: dist.Store, rank: int, world: int, description: Fingerprint, timeout_s: float) -> None:
    """Raise, on every rank alike, if the ranks are not about to train the same thing."""
    store.set(f"description/{rank}", json.dumps(description))
    first: Fingerprint = json.loads(_collect(store, "description", [0], timeout_s)[0])
    store.set(f"difference/{rank}", difference(first, description))
    verdicts = _collect(store, "difference", range(world), timeout_s)
    for other, found in enumerate(verdicts):
        if found:
            raise MismatchError(f"rank {other} does not train what rank 0 trains: {found}")


def difference(first: Fingerprint, other: Fingerprint) -> str:
    """The first few lines in which two descriptions differ."""
    lines = [
        f"{what} is {other.get(what, 'absent')} there, {first.get(what, 'absent')} on rank 0"
        for what in [*first, *(w for w in other if w not in first)]
        if first.get(what) != other.get(what)
    ]
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more


def _collect(store: dist.Store, what: str, ranks: list[int] | range, timeout_s: float) -> list[str]:
    keys = [f"{what}/{rank}" for rank in ranks]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as expired:
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        named = ", ".join(map(str, missing))
        raise RankLost(f"rank {named} did not call offbeat.attach() within {timeout_s:.0f} s") from expired
    return [store.get(key).decode() for key in keys]
