"""Enrolment: how a worker comes to its parameter server.

Either the server stands beside the workers: the first rank of each host keeps a shard of it. Or it was
started by `offbeat serve`, and workers come to its address one by one, when they like; they need no process
group.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import LaunchError, MismatchError, OffbeatError
from offbeat.server.messages import Tensors
from offbeat.server.optimizer_spec import OptimizerSpec
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import Fingerprint, difference
from offbeat.worlds.processes.server.channel import ClientIdentity
from offbeat.worlds.processes.server.config import ShardConfig
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.server.transport import ServerLinks
from offbeat.worlds.processes.server.wire import TOKEN

SERVER = "OFFBEAT_SERVER"  # the environment variable
SNAPSHOT_S = 30.0
PREFIX = "offbeat-server"
MOST_NUMEL = 1 << 40  # of a model


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What a server is to hold. The first worker brings it; it is believed if signed with the token."""

    strategy: str
    settings: dict[str, Any]
    flats: list[tuple[str, int]]  # dtype and number of elements
    optimizer: dict[str, Any] | None  # an `OptimizerSpec` of all of them, where workers push gradients
    description: Fingerprint
    timeout_s: float

    @classmethod
    def of(
        cls, strategy: Strategy[Any], replica: Replica, description: Fingerprint, timeout_s: float
    ) -> ServerSpec:
        return cls(
            strategy=strategy.name,
            settings=strategy.settings(),
            flats=[(str(w.dtype).removeprefix("torch."), w.numel()) for w in replica.weights],
            optimizer=asdict(OptimizerSpec.of(replica)) if strategy.server_steps else None,
            description=description,
            timeout_s=timeout_s,
        )

    def post(self, shard: int, shards: int, **where: Any) -> ShardConfig:
        """What a shard is told."""
        parts = [(n * shard // shards, n * (shard + 1) // shards) for _, n in self.flats]
        whole = OptimizerSpec(**self.optimizer) if self.optimizer else None
        return ShardConfig(
            shard=shard,
            parent=os.getpid(),
            strategy=self.strategy,
            settings=self.settings,
            sizes=[(dtype, high - low) for (dtype, _), (low, high) in zip(self.flats, parts, strict=True)],
            optimizer=asdict(whole.share(parts)) if whole else None,
            timeout_s=self.timeout_s,
            **where,
        )

    def signed(self, token: bytes) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{_signature(token, text)} {text}"

    @classmethod
    def read(cls, signed: str, token: bytes) -> ServerSpec:
        signature, _, text = signed.partition(" ")
        if not hmac.compare_digest(signature, _signature(token, text)):
            raise OffbeatError(f"the plan for the server is not signed with this token: check {TOKEN}")
        plan = cls(**json.loads(text))
        if not all(0 <= numel <= MOST_NUMEL for _, numel in plan.flats):
            raise OffbeatError("the plan for the server speaks of a model that is too large")
        return plan


def _signature(token: bytes, text: str) -> str:
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


# --- beside the workers


def start_colocated(port: ProcessPort, plan: ServerSpec, weights: Tensors) -> ServerLinks:
    """Start a shard beside each host's first rank, and go to all of them."""
    store = port.failures.store
    local = int(os.environ.get("LOCAL_RANK", port.rank))  # not set: all on one host
    # Where a slower network is emulated, every rank stands for a host.
    first = port.rank if port.shaper else port.rank - local
    store.set(f"first/{port.rank}", str(first))
    everybody = [int(store.get(f"first/{rank}")) for rank in range(port.world)]
    hosts = sorted(set(everybody))
    server_store, name, (host, tcp_port) = _meeting_place(store, port.rank)
    token = _shared_token(store, port.rank)
    keeper = None
    if port.rank in hosts:
        shard = hosts.index(port.rank)
        post = plan.post(
            shard,
            len(hosts),
            host=host,
            port=tcp_port,
            prefix=f"{PREFIX}/{name}",
            workers=port.world,
            neighbours=[rank for rank, home in enumerate(everybody) if home == port.rank],
            snapshot=str(Path(tempfile.gettempdir()) / f"offbeat-{name}" / f"shard-{shard}"),
            snapshot_s=SNAPSHOT_S,
        )
        keeper = Supervisor(post, token)
    caller = ClientIdentity(server_store, host, port.rank, token, port.timeout_s)
    shards = [f"the parameter server's shard beside rank {rank}" for rank in hosts]
    return ServerLinks(port, caller, shards, weights, keeper, hosts.index(first))


def _meeting_place(store: dist.Store, rank: int) -> tuple[dist.Store, str, tuple[str, int]]:
    """A store that processes started later can reach too, the server's name in it, and its address.

    It is the launcher's own, if that is reached by TCP, so it outlives every rank.
    """
    base = _get_default_store()
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if rank == 0:
        if not isinstance(base, dist.TCPStore):
            base = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        host = os.environ.get("MASTER_ADDR", base.host) if base.host == "localhost" else base.host
        store.set("server/address", f"{host} {base.port} {secrets.token_hex(8)}")
    host, port, name = store.get("server/address").decode().split()
    if not isinstance(base, dist.TCPStore):
        base = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"{PREFIX}/{name}", base), name, (host, int(port))


def _shared_token(store: dist.Store, rank: int) -> bytes:
    """What proves that a worker belongs: from the environment, or drawn by rank 0."""
    if TOKEN in os.environ:
        return os.environ[TOKEN].encode()
    if rank == 0:
        store.set("server/token", secrets.token_hex(32))
    return store.get("server/token")


# --- elsewhere: the server was started by `offbeat serve`


@dataclass(frozen=True)
class Rendezvous:
    """Where a dedicated server receives its workers: a store at an address, which both sides know."""

    store: dist.Store
    host: str
    port: int
    timeout_s: float = 0.0  # how long a worker waits for what the server puts up

    @cached_property
    def worker(self) -> int:
        """This worker's number: one that nobody else has or had."""
        return self.store.add("enrolled", 1) - 1

    def opens(self) -> bool:
        """Whether it is this worker that gives an empty server its weights."""
        return self.store.compare_set("opens", "", str(self.worker)).decode() == str(self.worker)

    @classmethod
    def at(cls, address: str, timeout_s: float) -> Rendezvous:
        host, port = parse_address(address)
        try:
            store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, OSError) as unreachable:
            why = str(unreachable).splitlines()[0]
            raise LaunchError(f"no server at {address}: {why}; is `offbeat serve` running there?") from None
        return cls(dist.PrefixStore(PREFIX, store), host, port, timeout_s)

    def number(self, name: str) -> int:
        """A setting that `offbeat serve` has put up: `workers` or `shards`."""
        return int(self._get(name))

    def _get(self, key: str) -> str:
        try:
            self.store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as expired:
            raise LaunchError(
                f"what listens at {self.host}:{self.port} has told nothing for {self.timeout_s:.0f} s: "
                "is it `offbeat serve`?"
            ) from expired
        return self.store.get(key).decode()

    def put_up(self, token: bytes, **numbers: int) -> None:
        """The server's side: say what workers and further servers need to know."""
        self.store.set("seal", _signature(token, PREFIX))
        for name, number in numbers.items():
            self.store.set(name, str(number))

    def check(self, token: bytes) -> None:
        """Before anything is brought or asked for: do both sides have the same token?"""
        if not hmac.compare_digest(self._get("seal"), _signature(token, PREFIX)):
            raise LaunchError(f"the server at {self.host}:{self.port} has another token: check {TOKEN}")

    def propose(self, plan: ServerSpec, token: bytes) -> None:
        """Bring the plan, or find that the one that was brought before is the same."""
        signed = plan.signed(token)
        agreed = self.store.compare_set("plan", "", signed).decode()
        if agreed != signed:
            theirs = ServerSpec.read(agreed, token)
            found = difference(theirs.description, plan.description)
            if found:
                raise MismatchError(f"this worker does not train what the server holds: {found}")

    def plan(self, token: bytes, on: Callable[[], None] = lambda: None) -> ServerSpec:
        """The plan, once a worker has brought it; `on` is called now and then while waiting."""
        while not self.store.check(["plan"]):
            on()
            time.sleep(0.1)
        return ServerSpec.read(self.store.get("plan").decode(), token)


def parse_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(f"{address!r} is not an address: write HOST:PORT, such as 10.0.0.1:29600")
    return host, int(port)


def needed_token() -> bytes:
    if not os.environ.get(TOKEN):
        raise LaunchError(
            f"set {TOKEN} to the secret that the server and all workers share: "
            "`offbeat serve` prints one where none is set"
        )
    return os.environ[TOKEN].encode()


def connect_dedicated(port: ProcessPort, desk: Rendezvous, plan: ServerSpec, weights: Tensors) -> ServerLinks:
    """Go to all shards of a dedicated server."""
    token = needed_token()
    desk.check(token)
    desk.propose(plan, token)
    caller = ClientIdentity(desk.store, desk.host, desk.worker, token, port.timeout_s)
    shards = [f"shard {k} of the server at {desk.host}:{desk.port}" for k in range(desk.number("shards"))]
    return ServerLinks(port, caller, shards, weights)


# --- either


def connect_server(
    port: ProcessPort, plan: ServerSpec, weights: Tensors, desk: Rendezvous | None
) -> ServerLinks:
    """Go to the server. Afterwards it has weights: this worker's or somebody else's, which are read then."""
    server = (
        start_colocated(port, plan, weights) if desk is None else connect_dedicated(port, desk, plan, weights)
    )
    had_weights = server.filled
    if not had_weights and (port.rank == 0 if desk is None or not port.standalone else desk.opens()):
        server.open(weights)
    # Beside the workers it has rank 0's, as all ranks have: a read might hold others' first updates.
    if desk is not None and (had_weights or port.standalone):
        server.pull(weights, None).wait()
    return server
