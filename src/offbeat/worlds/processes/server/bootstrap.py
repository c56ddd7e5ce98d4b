"""Bootstrap: connects a worker to its parameter server.

A colocated server runs beside the workers: the first rank of each host starts a process with the shards of
that host. A dedicated server was started by `offbeat serve`: workers connect to its address one by one, at
any time, and need no process group.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.core.pending import block_on
from offbeat.errors import LaunchError, MismatchError, OffbeatError, RankLost, SettingError
from offbeat.server.half import ServerHalf
from offbeat.server.messages import Tensors
from offbeat.worlds.processes.hosts import host_number
from offbeat.worlds.processes.listen_store import listen_store
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import difference
from offbeat.worlds.processes.server.auth import TOKEN, run_token, sign
from offbeat.worlds.processes.server.channel import ClientIdentity
from offbeat.worlds.processes.server.config import SPEC, ServerSpec
from offbeat.worlds.processes.server.discovery import INSECURE, publish_failure
from offbeat.worlds.processes.server.shard_count import SLOWEST, shared_pieces
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.server.standby import Standby, publish_supervisor
from offbeat.worlds.processes.server.supervisor import Supervisor
from offbeat.worlds.processes.server.transport import ProcessServerClient, TcpTransport
from offbeat.worlds.processes.store import DeadlineStore

SERVER = "OFFBEAT_SERVER"  # the environment variable
REPLICATE = "OFFBEAT_REPLICATE"  # the environment variable: keep a copy of each shard beside the next one
SNAPSHOT_S = 30.0
INITIALIZATION_S = 30.0  # for the first worker to bring the weights, before another one does
SECRET_BYTES = 32
PREFIX = "offbeat-server"
log = logging.getLogger("offbeat")


# --- colocated: shards beside the workers


def start_colocated(
    port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors, insecure: bool
) -> ProcessServerClient:
    """Start shards beside each host's first rank, and connect to all of them."""
    token = shared_token(port, weights[0].device)
    name = sign(token, "name", "")[:16]
    store = SignedStore(port.failures.store, token)
    store.set(f"host/{port.rank}", str(host_number(port.global_rank, emulated=port.shaper is not None)))
    host_of = [int(store.get(f"host/{rank}")) for rank in range(port.world)]
    first_of = [host_of.index(number) for number in host_of]  # of a group, not all ranks of a host are here
    first = first_of[port.rank]
    hosts = sorted(set(first_of))
    base, (host, tcp_port) = shared_store(store, port.rank)
    prefix = f"{PREFIX}/{name}"
    server_store = DeadlineStore(base, port.timeout_s).prefixed(prefix)
    own = hosts.index(first)
    pieces = shared_pieces(port, store, spec, len(hosts), weights[0].device)
    local_shards = range(own * pieces, (own + 1) * pieces)
    config = spec.process_config(
        own,
        len(hosts),
        pieces,
        snapshots=Path(tempfile.gettempdir()) / f"offbeat-{name}",
        replicate=replicates(len(hosts)),
        host=host,
        tcp_port=tcp_port,
        prefix=prefix,
        workers=port.world,
        local_workers=[rank for rank, first_rank in enumerate(first_of) if first_rank == first],
        snapshot_s=SNAPSHOT_S,
        insecure=insecure,
    )
    supervisor = standby = None
    if port.rank == first:
        publish_supervisor(server_store, token, config.shard)
        supervisor = Supervisor(config, token, partial(_publish_failures, server_store, token, local_shards))
    else:
        standby = Standby(server_store, config, token)
    identity = ClientIdentity(server_store, host, port.rank, token, port.timeout_s, insecure)
    shards = [
        f"the parameter server's shard beside rank {port.failures.names[rank]}"
        for rank in hosts
        for _ in range(pieces)
    ]
    transport = TcpTransport(
        identity,
        shards,
        weights,
        port.ledger,
        port.shaper,
        supervisor,
        local_shards,
        standby,
        pieces=pieces,
    )
    return _client(transport, port, spec, half, weights)


def _client(
    transport: TcpTransport, port: ProcessPort, spec: ServerSpec, half: ServerHalf, weights: Tensors
) -> ProcessServerClient:
    return ProcessServerClient(
        transport, half, world=port.world, weights=weights, state_parts=spec.state_parts
    )


def _publish_failures(store: DeadlineStore, token: bytes, shards: range, reason: str) -> None:
    for shard in shards:
        publish_failure(store, token, shard, reason)


def replicates(hosts: int) -> bool:
    """Return whether each shard's state is copied to the next host, as the environment asks."""
    asked = bool(os.environ.get(REPLICATE))
    if asked:
        check_second(hosts)
    return asked


def check_second(shards: int) -> None:
    """Raise an error if there is no second shard for a copy."""
    if shards < 2:
        raise SettingError(
            "a copy of each shard needs two shards: a single one has no other to keep its copy. Train on a "
            "second host, or let `offbeat serve` start two shards"
        )


def shared_token(port: ProcessPort, device: torch.device) -> bytes:
    """Return the token of this run, which all ranks derive from OFFBEAT_TOKEN and a secret of rank 0.

    The secret is broadcast between the ranks and never in a store, which strangers may reach. Without
    OFFBEAT_TOKEN it is all there is, and known to those who read what the ranks send to each other.
    """
    secret = torch.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), dtype=torch.uint8)
    pending = port.broadcast(secret.to(device))
    pending.wait()
    return run_token(os.environ.get(TOKEN, "").encode(), bytes(pending.result().tolist()))


def shared_store(store: SignedStore, rank: int) -> tuple[dist.TCPStore, tuple[str, int]]:
    """Return a store that later processes can reach too, and its address.

    If the launcher's own store is a TCPStore, that one is returned: it outlives every rank.
    """
    base = _get_default_store()
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if rank == 0:
        if not isinstance(base, dist.TCPStore):
            base = listen_store("127.0.0.1", 0)
        host = os.environ.get("MASTER_ADDR", base.host) if base.host == "localhost" else base.host
        store.set("server/address", f"{host} {base.port}")
    host, tcp_port = store.get("server/address").split()
    if not isinstance(base, dist.TCPStore):
        base = dist.TCPStore(host, int(tcp_port), is_master=False, wait_for_workers=False)
    return base, (host, int(tcp_port))


# --- dedicated: a server that `offbeat serve` started


@dataclass(frozen=True)
class Rendezvous:
    """A store at an address that a dedicated server and its workers know, where they find each other."""

    base: DeadlineStore  # whose keys are those of the run, behind its prefix
    host: str
    tcp_port: int
    run: str  # the name of the run, drawn by the server
    token: bytes  # of the run

    @classmethod
    def start(cls, host: str, tcp_port: int, token: bytes, **numbers: int) -> Rendezvous:
        """Listen, on the server's side, and publish the values that workers and further servers need."""
        store, run = listen_store(host, tcp_port), secrets.token_hex(8)
        rendezvous = cls(DeadlineStore(store), host, store.port, run, run_token(token, run.encode()))
        for name, number in numbers.items():
            rendezvous._signed.set(name, str(number))
        SignedStore(rendezvous.base.prefixed(PREFIX), token).set("run", run)
        return rendezvous

    @classmethod
    def at(cls, address: str, token: bytes, timeout_s: float) -> Rendezvous:
        """Connect to a server; raise an error if it has another token."""
        host, tcp_port = parse_address(address)
        try:
            store = dist.TCPStore(
                host, tcp_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, OSError) as unreachable:
            why = str(unreachable).splitlines()[0]
            raise LaunchError(f"no server at {address}: {why}; is `offbeat serve` running there?") from None
        return cls.of(DeadlineStore(store, timeout_s), host, tcp_port, token)

    @classmethod
    def of(cls, base: DeadlineStore, host: str, tcp_port: int, token: bytes) -> Rendezvous:
        """Read the name of the run from the store; raise an error if the server has another token."""
        try:
            run = SignedStore(base.prefixed(PREFIX), token).get("run")
        except RankLost as expired:
            raise LaunchError(
                f"the process at {host}:{tcp_port} has published nothing for "
                f"{base.timeout_s:.0f} s: is it `offbeat serve`?"
            ) from expired
        except OffbeatError:
            raise LaunchError(f"the server at {host}:{tcp_port} has another token: check {TOKEN}") from None
        return cls(base, host, tcp_port, run, run_token(token, run.encode()))

    @property
    def prefix(self) -> str:
        """The prefix of the run's keys in the store."""
        return f"{PREFIX}/{self.run}"

    @cached_property
    def store(self) -> DeadlineStore:
        """The run's part of the store."""
        return self.base.prefixed(self.prefix)

    @property
    def _signed(self) -> SignedStore:
        return SignedStore(self.store, self.token)

    @cached_property
    def worker(self) -> int:
        """This worker's number, which no other worker has or ever had."""
        return self.store.add("enrolled", 1) - 1

    def claim_initialization(self) -> bool:
        """Claim to give the server its initial weights; return whether this worker is the first to claim."""
        return self._signed.propose("initializes", str(self.worker)) == str(self.worker)

    def await_initialization(self, lease_s: float) -> bool:
        """Wait until the worker that claimed has given the server its weights.

        Return True if this worker must do it, because the other has not within its lease: it may have died.
        """
        own = str(self.worker)
        while not self.store.wait(["initialized"], lease_s):
            claimed = self._signed.get("initializes")
            if self._signed.replace("initializes", claimed, own) == own:
                log.warning("worker %s has brought no weights for %.0f s: this one does", claimed, lease_s)
                return True
        self._signed.get("initialized")  # raises an error if somebody else has written it
        return False

    def mark_initialized(self) -> None:
        """Publish that the server has its initial weights."""
        self._signed.set("initialized", "1")

    def number(self, name: str) -> int:
        """Read a setting that `offbeat serve` has published: `workers`, `shards` (processes) or `pieces`."""
        return int(self._signed.get(name))

    def pieces(self, spec: ServerSpec) -> int:
        """Return the number of shards in each of the server's processes."""
        asked, workers = self.number("pieces"), self.number("workers")
        return asked or spec.pieces(
            self.number("shards"), workers, SLOWEST
        )  # nobody knows the workers' links

    def propose(self, spec: ServerSpec) -> None:
        """Publish the server's specification, or check that it equals the one an earlier worker published."""
        signed = spec.signed(self.token)
        agreed = self.store.compare_set(SPEC, "", signed)
        if agreed.decode() != signed:
            theirs = ServerSpec.read(agreed, self.token)
            found = difference(theirs.description, spec.description)
            if found:
                raise MismatchError(f"this worker does not train what the server holds: {found}")

    def wait_for_spec(self) -> ServerSpec:
        """Return the specification of the server, once a worker has published it."""
        while not self.store.check([SPEC]):
            time.sleep(0.1)
        return ServerSpec.read(self.store.get(SPEC), self.token)


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
    port: ProcessPort,
    rendezvous: Rendezvous,
    spec: ServerSpec,
    half: ServerHalf,
    weights: Tensors,
    insecure: bool,
) -> ProcessServerClient:
    """Connect to all shards of a dedicated server."""
    rendezvous.propose(spec)
    host, tcp_port, token = rendezvous.host, rendezvous.tcp_port, rendezvous.token
    identity = ClientIdentity(rendezvous.store, host, rendezvous.worker, token, port.timeout_s, insecure)
    hosts, pieces = rendezvous.number("shards"), rendezvous.pieces(spec)
    shards = [f"shard {k} of the server at {host}:{tcp_port}" for k in range(hosts * pieces)]
    transport = TcpTransport(identity, shards, weights, port.ledger, port.shaper, pieces=pieces)
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
    port: ProcessPort,
    spec: ServerSpec,
    half: ServerHalf,
    weights: Tensors,
    rendezvous: Rendezvous | None,
    insecure: bool = False,
) -> ProcessServerClient:
    """Connect to the server; give it this worker's weights, or read the weights that it already has.

    `insecure`: connections between hosts need not be encrypted.
    """
    insecure = insecure or bool(os.environ.get(INSECURE))
    if rendezvous is None:
        client = start_colocated(port, spec, half, weights, insecure)
    else:
        client = connect_dedicated(port, rendezvous, spec, half, weights, insecure)
    had_weights = client.transport.has_weights
    if not had_weights:
        _initialize(client, port, weights, rendezvous)
    # A colocated server has rank 0's weights, which all ranks have: a read could contain first updates.
    if rendezvous is not None and (had_weights or port.standalone):
        client.pull(weights, None).wait()
    return client
