"""Connection of an elastic worker: find the store, check that all train the same, and open a port."""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from offbeat.core.elastic import check_elastic
from offbeat.core.elastic_session import ElasticSession
from offbeat.core.membership import Member
from offbeat.core.replica import Replica
from offbeat.core.roster import foreign_text, read_json
from offbeat.core.strategy import Strategy
from offbeat.errors import MismatchError, SettingError
from offbeat.worlds.processes.elastic.groups import RosterGroups
from offbeat.worlds.processes.elastic.heartbeat import Heartbeat
from offbeat.worlds.processes.elastic.port import ElasticPort
from offbeat.worlds.processes.elastic.registry import (
    MEMBER,
    ROOT,
    StoreRegistry,
    open_store,
    training_registry,
)
from offbeat.worlds.processes.ledger import SharedLedger
from offbeat.worlds.processes.rendezvous import Fingerprint, difference

_names = 0  # taken by this process
_trainings = 0  # that this process has finished: all workers give the same number to the same training
_is_open = False


def connect_elastic(
    strategy: Strategy[Any], replica: Replica, fingerprint: Fingerprint, minimum: int, timeout_s: float
) -> tuple[ElasticSession[Any], ElasticPort]:
    """Open a session with whoever is in the roster; it joins when its weights are broadcast."""
    global _is_open
    check_elastic(strategy, minimum)
    if _is_open:
        raise SettingError(
            "elastic=True: this process has an elastic attachment already; close() that one first"
        )
    root = dist.PrefixStore(ROOT, open_store(timeout_s))
    rank, founders = _place()
    attachment = f"training/{_trainings}"
    store = dist.PrefixStore(attachment, root)
    _check_fingerprint(training_registry(root, attachment), fingerprint)
    name = _take_name(rank)
    heartbeat = Heartbeat(name, root, attachment, timeout_s)
    registry = training_registry(root, attachment, heartbeat.stale)
    member = Member(name, registry, heartbeat, minimum, max(founders, minimum))
    groups = RosterGroups(member, store, heartbeat, timeout_s)
    ledger = SharedLedger(rank, time.monotonic)
    port = ElasticPort(member, groups, heartbeat, store, ledger, timeout_s, _on_end)
    _is_open = True
    return ElasticSession(strategy, replica, port, registry), port


def _check_fingerprint(registry: StoreRegistry, fingerprint: Fingerprint) -> None:
    """Raise an error if this worker does not train what the first one trains."""
    text = registry.set_once("fingerprint", json.dumps(fingerprint)).result()
    first = read_json(text)
    if not isinstance(first, dict):
        raise foreign_text("a fingerprint", text)
    if found := difference(first, fingerprint):
        raise MismatchError(f"this worker does not train what the others train: {found}")


def _on_end(finished: bool) -> None:
    """Count a training that has finished; one that failed here goes on elsewhere, and can be joined again."""
    global _trainings, _is_open
    _trainings += finished
    _is_open = False


def _place() -> tuple[int, int]:
    """Return this worker's rank and the number of founders, as the launcher gave them."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _take_name(rank: int) -> str:
    """Return a name that no worker has had, nor this one before; founders are sorted by it."""
    global _names
    _names += 1
    return f"{os.environ.get(MEMBER) or f'rank{rank:04}-{uuid.uuid4().hex[:8]}'}.{_names}"
