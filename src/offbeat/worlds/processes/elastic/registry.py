"""Registry of a membership in a torch store, and the place of that store.

The store must live in a process that no worker's death ends: `offbeat rendezvous`, or a launcher.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.core.pending import Arrived
from offbeat.errors import LaunchError, RankLost
from offbeat.worlds.processes.interface import choose_interface
from offbeat.worlds.processes.server.auth import TOKEN, run_token, sign, verify

T = TypeVar("T")
RENDEZVOUS = "OFFBEAT_RENDEZVOUS"  # HOST:PORT of the store
MEMBER = "OFFBEAT_MEMBER"  # this worker's name, given by a launcher
ABSENT = "\0"  # stands for a key that does not exist
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02

HOW_TO_START = f"""\
elastic=True needs a store that no worker's death ends, and there is none.
Start one, and give every worker its address:
    offbeat rendezvous HOST:PORT
    {RENDEZVOUS}=HOST:PORT RANK=0 WORLD_SIZE=4 python train.py    each rank by itself
or let Offbeat start the workers, and start them again if they die: offbeat train TASK, elastic."""


ROOT = "offbeat/elastic"  # the prefix of all keys
DEPARTURES = "departures"  # the number of workers that are gone, by which the others see that there are news


def report_death(store: dist.Store, member: str) -> None:
    """Let all workers know that the process of this member is dead, as only who started it can know."""
    root = dist.PrefixStore(ROOT, store)
    root.set(f"gone/{member}", "its process has died")
    root.add(DEPARTURES, 1)


def training_registry(root: dist.Store, attachment: str, stale: deque[str] | None = None) -> StoreRegistry:
    """Return the registry of one training. Where there is a token, only who knows it can write its texts."""
    token = os.environ.get(TOKEN, "").encode()
    token = token and run_token(token, attachment.encode())
    return StoreRegistry(dist.PrefixStore(attachment, root), stale, token)


class StoreRegistry:
    """A registry in a torch store, with texts that are signed by a token, if there is one.

    Every call is made at once, except that `stale` keys are deleted later.
    """

    def __init__(self, store: dist.Store, stale: deque[str] | None = None, token: bytes = b"") -> None:
        self._store = store
        self._stale = stale
        self._token = token
        self._pause_s = SHORTEST_PAUSE_S

    def get(self, key: str) -> Arrived[str | None]:
        # Unlike `get`, this does not wait for a key that does not exist, and does not create it.
        value = self._call(lambda: self._store.compare_set(key, ABSENT, ABSENT))
        return Arrived(None if value == ABSENT.encode() else self._read(key, value))

    def set(self, key: str, value: str) -> Arrived[None]:
        self._call(lambda: self._store.set(key, self._signed(key, value)))
        return Arrived(None)

    def set_once(self, key: str, value: str) -> Arrived[str]:
        signed = self._signed(key, value)
        return Arrived(self._read(key, self._call(lambda: self._store.compare_set(key, "", signed))))

    def add(self, key: str, amount: int) -> Arrived[int]:
        self._pause_s = SHORTEST_PAUSE_S
        return Arrived(int(self._call(lambda: self._store.add(key, amount))))

    def delete(self, key: str) -> Arrived[None]:
        if self._stale is not None:  # by another thread: a step does not wait for it
            self._stale.append(key)
        else:
            self._call(lambda: self._store.delete_key(key))
        return Arrived(None)

    def pause(self) -> Arrived[None]:
        """Sleep, longer and longer: answers come either soon or after a failure."""
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)
        return Arrived(None)

    def _signed(self, key: str, value: str) -> str:
        return sign(self._token, key, value) if self._token else value

    def _read(self, key: str, value: bytes) -> str:
        return verify(self._token, key, value) if self._token else value.decode(errors="replace")

    @staticmethod
    def _call(make: Callable[[], T]) -> T:
        try:
            return make()
        except RuntimeError as error:  # whatever a store client raises when its server cannot be reached
            raise RankLost(
                f"the rendezvous store cannot be reached, so this worker is cut off ({error})"
            ) from error


def open_store(timeout_s: float) -> dist.Store:
    """Connect to the store that the environment names, or return that of the user's process group."""
    limit = timedelta(seconds=timeout_s)
    if address := os.environ.get(RENDEZVOUS):
        return connect_store(address, timeout_s)
    if dist.is_initialized():
        return _get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, tcp_port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        choose_interface(host, tcp_port)
        return dist.TCPStore(host, tcp_port, is_master=False, timeout=limit)
    raise LaunchError(HOW_TO_START)


def connect_store(address: str, timeout_s: float) -> dist.Store:
    """Connect to the store at HOST:PORT."""
    host, _, tcp_port = address.rpartition(":")
    if not host or not tcp_port.isdigit():
        raise LaunchError(f"{RENDEZVOUS}={address!r}: give HOST:PORT of `offbeat rendezvous`")
    choose_interface(host, int(tcp_port))
    try:
        return dist.TCPStore(host, int(tcp_port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise LaunchError(
            f"no store answers at {address} ({error}): start `offbeat rendezvous` there"
        ) from error
