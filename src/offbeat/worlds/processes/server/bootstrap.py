"""Bootstrap: connects a worker to its parameter server.

A colocated server runs beside the workers: the first rank of each host starts a shard. A dedicated server was
started by `offbeat serve`: workers connect to its address one by one, at any time, and need no process group.
"""

from __future__ import annotations

import hmac
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
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.server.transport import ProcessServerClient, TcpTransport

SERVER = "OFFBEAT_SERVER"  # the environment variable
SNAPSHOT_S = 30.0
PREFIX = "offbeat-server"


# --- colocated: shards beside the workers


def start_colocated(
    port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors
) -> ProcessServerClient:
    """Start a shard beside each host's first rank, and connect to all of them."""
    store = port.failures.store
    local = int(os.environ.get("LOCAL_RANK", port.global_rank))  # not set: all on one host
    # Under an emulated network every rank stands for a host.
    host_number = port.global_rank if port.shaper else port.global_rank - local
    store.set(f"host/{port.rank}", str(host_number))
    host_of = [int(store.get(f"host/{rank}")) for rank in range(port.world)]
    first_of = [host_of.index(number) for number in host_of]  # of a group, not all ranks of a host are here
    first = first_of[port.rank]
    hosts = sorted(set(first_of))
    server_store, name, (host, tcp_port) = _shared_store(store, port.rank)
    token = _shared_token(store, port.rank)
    supervisor = None
    if port.rank in hosts:
        shard = hosts.index(port.rank)
        config = spec.shard_config(
            shard,
            len(hosts),
            host=host,
            tcp_port=tcp_port,
            prefix=f"{PREFIX}/{name}",
            workers=port.world,
            local_workers=[rank for rank, first_rank in enumerate(first_of) if first_rank == port.rank],
            snapshot=str(Path(tempfile.gettempdir()) / f"offbeat-{name}" / f"shard-{shard}"),
            snapshot_s=SNAPSHOT_S,
        )
        supervisor = Supervisor(config, token)
    identity = ClientIdentity(server_store, host, port.rank, token, port.timeout_s)
    shards = [f"the parameter server's shard beside rank {port.failures.names[rank]}" for rank in hosts]
    transport = TcpTransport(
        identity, shards, weights, port.ledger, port.shaper, supervisor, hosts.index(first)
    )
    return _client(transport, port, spec, half, weights)


def _client(
    transport: TcpTransport, port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors
) -> ProcessServerClient:
    return ProcessServerClient(
        transport, half, world=port.world, weights=weights, state_parts=spec.state_parts
    )


def _shared_store(store: dist.Store, rank: int) -> tuple[dist.Store, str, tuple[str, int]]:
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


def _shared_token(store: dist.Store, rank: int) -> bytes:
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

    store: dist.Store
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
        return cls(dist.PrefixStore(PREFIX, store), host, tcp_port, timeout_s)

    def number(self, name: str) -> int:
        """Read a setting that `offbeat serve` has published: `workers` or `shards`."""
        return int(self._get(name))

    def _get(self, key: str) -> str:
        try:
            self.store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as expired:
            raise LaunchError(
                f"the process at {self.host}:{self.tcp_port} has published nothing for "
                f"{self.timeout_s:.0f} s: is it `offbeat serve`?"
            ) from expired
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


def _initializes(port: ProcessPort, rendezvous: Rendezvous | None) -> bool:
    """Return whether this worker gives an empty server its initial weights."""
    if rendezvous is None or not port.standalone:
        return port.rank == 0
    return rendezvous.claim_initialization()


def connect_server(
    port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors, rendezvous: Rendezvous | None
) -> ProcessServerClient:
    """Connect to the server; give it this worker's weights, or read the weights that it already has."""
    if rendezvous is None:
        client = start_colocated(port, spec, half, weights)
    else:
        client = connect_dedicated(port, rendezvous, spec, half, weights)
    had_weights = client.transport.has_weights
    if not had_weights and _initializes(port, rendezvous):
        block_on(client.load(weights))
    # A colocated server has rank 0's weights, which all ranks have: a read could contain first updates.
    if rendezvous is not None and (had_weights or port.standalone):
        client.pull(weights, None).wait()
    return client
