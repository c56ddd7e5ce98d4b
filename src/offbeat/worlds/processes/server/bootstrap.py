"""Bootstrap: connects a worker to its parameter server.

A colocated server runs beside the workers: the first rank of each host starts a shard. A dedicated server was
started by `offbeat serve`: workers connect to its address one by one, at any time, and need no process group.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.core.pending import block_on
from offbeat.errors import LaunchError, MismatchError
from offbeat.server.half import ServerHalf
from offbeat.server.messages import Tensors
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import difference
from offbeat.worlds.processes.server.auth import TOKEN, token_digest
from offbeat.worlds.processes.server.channel import ClientIdentity
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.standby import Standby, publish_supervisor
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.server.transport import ProcessServerClient, TcpTransport
from offbeat.worlds.processes.store import DeadlineStore

SERVER = "OFFBEAT_SERVER"  # the environment variable
SNAPSHOT_S = 30.0
INITIALIZATION_S = 30.0  # for the first worker to bring the weights, before another one does
PREFIX = "offbeat-server"
log = logging.getLogger("offbeat")


# --- colocated: shards beside the workers


def start_colocated(
    port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors
) -> ProcessServerClient:
    """Start a shard beside each host's first rank, and connect to all of them."""
    store = port.failures.store
    local = int(os.environ.get("LOCAL_RANK", port.rank))  # not set: all on one host
    # Under an emulated network every rank stands for a host.
    first = port.rank if port.shaper else port.rank - local
    store.set(f"first/{port.rank}", str(first))
    first_of = [int(store.get(f"first/{rank}")) for rank in range(port.world)]
    hosts = sorted(set(first_of))
    shared, name, (host, tcp_port) = _shared_store(store, port.rank)
    server_store = DeadlineStore(shared, port.timeout_s)
    token = _shared_token(store, port.rank)
    shard = hosts.index(first)
    config = spec.shard_config(
        shard,
        len(hosts),
        host=host,
        tcp_port=tcp_port,
        prefix=f"{PREFIX}/{name}",
        workers=port.world,
        local_workers=[rank for rank, first_rank in enumerate(first_of) if first_rank == first],
        snapshot=str(Path(tempfile.gettempdir()) / f"offbeat-{name}" / f"shard-{shard}"),
        snapshot_s=SNAPSHOT_S,
    )
    supervisor = standby = None
    if port.rank == first:
        publish_supervisor(server_store, shard)
        supervisor = Supervisor(config, token)
    else:
        standby = Standby(server_store, config, token)
    identity = ClientIdentity(server_store, host, port.rank, token, port.timeout_s)
    shards = [f"the parameter server's shard beside rank {rank}" for rank in hosts]
    transport = TcpTransport(identity, shards, weights, port.ledger, port.shaper, supervisor, shard, standby)
    return _client(transport, port, spec, half, weights)


def _client(
    transport: TcpTransport, port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors
) -> ProcessServerClient:
    return ProcessServerClient(
        transport, half, world=port.world, weights=weights, state_parts=spec.state_parts
    )


def _shared_store(store: DeadlineStore, rank: int) -> tuple[dist.Store, str, tuple[str, int]]:
    """Return a store that later processes can reach too, the server's name in it, and the store's address.

    If the launcher's own store is a TCPStore, that one is returned: it outlives every rank.
    """
    base = _get_default_store()
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if rank == 0:
        if not isinstance(base, dist.TCPStore):
            base = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        host = os.environ.get("MASTER_ADDR", base.host) if base.host == "localhost" else base.host
        store.set("server/address", f"{host} {base.port} {secrets.token_hex(8)}")
    host, tcp_port, name = store.get("server/address").decode().split()
    if not isinstance(base, dist.TCPStore):
        base = dist.TCPStore(host, int(tcp_port), is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"{PREFIX}/{name}", base), name, (host, int(tcp_port))


def _shared_token(store: DeadlineStore, rank: int) -> bytes:
    """Return the token of all workers: from the environment, or drawn by rank 0."""
    if TOKEN in os.environ:
        return os.environ[TOKEN].encode()
    if rank == 0:
        store.set("server/token", secrets.token_hex(32))
    return store.get("server/token")


# --- dedicated: a server that `offbeat serve` started


@dataclass(frozen=True)
class Rendezvous:
    """A store at an address that a dedicated server and its workers know, where they find each other."""

    store: DeadlineStore
    host: str
    tcp_port: int
    timeout_s: float = 0.0  # seconds that a worker waits for the server to publish a value

    @cached_property
    def worker(self) -> int:
        """This worker's number, which no other worker has or ever had."""
        return self.store.add("enrolled", 1) - 1

    def claim_initialization(self) -> bool:
        """Claim to give the server its initial weights; return whether this worker is the first to claim."""
        return self.store.compare_set("initializes", "", str(self.worker)).decode() == str(self.worker)

    def await_initialization(self, lease_s: float) -> bool:
        """Wait until the worker that claimed has given the server its weights.

        Return True if this worker must do it, because the other has not within its lease: it may have died.
        """
        while not self.store.wait(["initialized"], lease_s):
            claimed = self.store.get("initializes").decode()
            if self.store.compare_set("initializes", claimed, str(self.worker)) == str(self.worker).encode():
                log.warning("worker %s has brought no weights for %.0f s: this one does", claimed, lease_s)
                return True
        return False

    def mark_initialized(self) -> None:
        """Publish that the server has its initial weights."""
        self.store.set("initialized", "1")

    @classmethod
    def at(cls, address: str, timeout_s: float) -> Rendezvous:
        host, tcp_port = parse_address(address)
        try:
            store = dist.TCPStore(
                host, tcp_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, OSError) as unreachable:
            why = str(unreachable).splitlines()[0]
            raise LaunchError(f"no server at {address}: {why}; is `offbeat serve` running there?") from None
        return cls(DeadlineStore(dist.PrefixStore(PREFIX, store), timeout_s), host, tcp_port, timeout_s)

    def number(self, name: str) -> int:
        """Read a setting that `offbeat serve` has published: `workers` or `shards`."""
        return int(self._get(name))

    def _get(self, key: str) -> str:
        if not self.store.wait([key], self.timeout_s):
            raise LaunchError(
                f"the process at {self.host}:{self.tcp_port} has published nothing for "
                f"{self.timeout_s:.0f} s: is it `offbeat serve`?"
            )
        return self.store.get(key).decode()

    def publish(self, token: bytes, **numbers: int) -> None:
        """Publish, on the server's side, the values that workers and further servers need."""
        self.store.set("token_digest", token_digest(token, PREFIX))
        for name, number in numbers.items():
            self.store.set(name, str(number))

    def check(self, token: bytes) -> None:
        """Raise an error if the server has another token, before anything is exchanged."""
        if not hmac.compare_digest(self._get("token_digest"), token_digest(token, PREFIX)):
            raise LaunchError(f"the server at {self.host}:{self.tcp_port} has another token: check {TOKEN}")

    def propose(self, spec: ServerSpec, token: bytes) -> None:
        """Publish the server's specification, or check that it equals the one an earlier worker published."""
        signed = spec.signed(token)
        agreed = self.store.compare_set("spec", "", signed).decode()
        if agreed != signed:
            theirs = ServerSpec.read(agreed, token)
            found = difference(theirs.description, spec.description)
            if found:
                raise MismatchError(f"this worker does not train what the server holds: {found}")

    def wait_for_spec(self, token: bytes) -> ServerSpec:
        """Return the specification of the server, once a worker has published it."""
        while not self.store.check(["spec"]):
            time.sleep(0.1)
        return ServerSpec.read(self.store.get("spec").decode(), token)


def parse_address(address: str) -> tuple[str, int]:
    """Parse HOST:PORT."""
    host, colon, tcp_port = address.rpartition(":")
    if not colon or not host or not tcp_port.isdecimal() or int(tcp_port) > 65535:
        raise LaunchError(f"{address!r} is not an address: write HOST:PORT, such as 10.0.0.1:29600")
    return host, int(tcp_port)


def required_token() -> bytes:
    """Return the token from the environment; raise an error if none is set."""
    if not os.environ.get(TOKEN):
        raise LaunchError(
            f"set {TOKEN} to the secret that the server and all workers share: "
            "`offbeat serve` prints one if none is set"
        )
    return os.environ[TOKEN].encode()


def connect_dedicated(
    port: ProcessPort, rendezvous: Rendezvous, spec: ServerSpec, half: ServerHalf, weights: Tensors
) -> ProcessServerClient:
    """Connect to all shards of a dedicated server."""
    token = required_token()
    rendezvous.check(token)
    rendezvous.propose(spec, token)
    host, tcp_port = rendezvous.host, rendezvous.tcp_port
    identity = ClientIdentity(rendezvous.store, host, rendezvous.worker, token, port.timeout_s)
    shards = [f"shard {k} of the server at {host}:{tcp_port}" for k in range(rendezvous.number("shards"))]
    transport = TcpTransport(identity, shards, weights, port.ledger, port.shaper)
    return _client(transport, port, spec, half, weights)


# --- either


def _initialize(
    client: ProcessServerClient, port: ProcessPort, weights: Tensors, rendezvous: Rendezvous | None
) -> None:
    """Give an empty server this worker's weights, or wait until another worker has given its own."""
    if rendezvous is None or not port.standalone:
        if port.rank == 0:
            block_on(client.load(weights))
        return
    lease_s = min(port.timeout_s / 2, INITIALIZATION_S)
    if rendezvous.claim_initialization() or rendezvous.await_initialization(lease_s):
        block_on(client.load(weights, initial=True))
        rendezvous.mark_initialized()


def connect_server(
    port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors, rendezvous: Rendezvous | None
) -> ProcessServerClient:
    """Connect to the server; give it this worker's weights, or read the weights that it already has."""
    if rendezvous is None:
        client = start_colocated(port, spec, half, weights)
    else:
        client = connect_dedicated(port, rendezvous, spec, half, weights)
    had_weights = client.transport.has_weights
    if not had_weights:
        _initialize(client, port, weights, rendezvous)
    # A colocated server has rank 0's weights, which all ranks have: a read could contain first updates.
    if rendezvous is not None and (had_weights or port.standalone):
        client.pull(weights, None).wait()
    return client
