"""A worker's way to the parameter server: a link to every shard, and the host's own shard as a process."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.errors import RankLost
from offbeat.messages import Tensors
from offbeat.port import Pending
from offbeat.server import shares
from offbeat.strategy import Strategy
from offbeat.worlds.links import HEADER, NOW, WORKER, Kind, Link, finish, header, knock, prove
from offbeat.worlds.processes import ProcessPort
from offbeat.worlds.serving import Post, command

TOKEN = "OFFBEAT_TOKEN"


@dataclass(frozen=True)
class Beside:
    """A shard: which rank started it, and the link to it."""

    rank: int
    link: Link


class ServerLinks:
    """Push and pull, over links to all shards."""

    def __init__(self, port: ProcessPort, strategy: Strategy[Any], weights: Tensors) -> None:
        self._port = port
        store = port.rollcall.store
        local = int(os.environ.get("LOCAL_RANK", port.rank))  # not set: all on one host
        # Where a slower network is emulated, every rank stands for a host.
        first = port.rank if port.shaper else port.rank - local
        store.set(f"first/{port.rank}", str(first))
        everybody = [int(store.get(f"first/{rank}")) for rank in range(port.world)]
        self._home = first
        hosts = sorted(set(everybody))
        self._store, prefix, address = meeting_place(store, port.rank)
        token = shared_token(store, port.rank)
        self._process: subprocess.Popen[bytes] | None = None
        if port.rank in hosts:
            shard = hosts.index(port.rank)
            post = Post(
                host=address[0],
                port=address[1],
                prefix=prefix,
                shard=shard,
                parent=os.getpid(),
                workers=port.world,
                neighbours=[rank for rank, home in enumerate(everybody) if home == port.rank],
                strategy=strategy.name,
                settings=strategy.settings(),
                sizes=[
                    (str(w.dtype).removeprefix("torch."), w.numel())
                    for w in shares(weights, len(hosts))[shard]
                ],
                timeout_s=port.timeout_s,
            )
            self._process = subprocess.Popen(command(post), env={**os.environ, TOKEN: token.decode()})
        self.shards = [Beside(host, self._link(shard, token)) for shard, host in enumerate(hosts)]
        # What travels does so from the CPU; from a GPU by way of pinned memory.
        self._staging: Tensors | None = None
        if weights[0].is_cuda:
            self._staging = [torch.empty_like(w, device="cpu", pin_memory=True) for w in weights]

    def open(self, weights: Tensors) -> None:
        """Give the server the weights to start with."""
        for shard, share in zip(self.shards, self._shares(self._staged(weights)), strict=True):
            finish(shard.link.send(header(Kind.OPEN), *share))

    def push(self, update: Tensors, clock: int) -> Pending[None]:
        works, nbytes = [], 0
        for shard, share in zip(self.shards, self._shares(self._staged(update)), strict=True):
            works.append((shard, shard.link.send(header(Kind.PUSH, clock), *share)))
            nbytes += self._away(shard, share)
        return Exchange(self._port, works, nbytes, lambda: None)

    def pull(self, into: Tensors, clock: int | None) -> Pending[int]:
        landing = into if self._staging is None else self._staging
        works, heads, nbytes = [], [], 0
        for shard, share in zip(self.shards, self._shares(landing), strict=True):
            head = torch.zeros(HEADER, dtype=torch.int64)
            heads.append((shard, head))
            asked = shard.link.send(header(Kind.PULL, NOW if clock is None else clock))
            works.append((shard, asked + shard.link.receive(head, *share)))
            nbytes += self._away(shard, share)

        def land() -> int:
            if self._staging is not None:
                torch._foreach_copy_(into, self._staging)
            return self._landed(heads)

        # The bytes of the answer leave the shard's NIC, which the host's first worker accounts for.
        return Exchange(self._port, works, nbytes, land, answer=True)

    def leave(self) -> None:
        """Say goodbye to all shards. One that this rank started ends when nobody is left to serve."""
        for shard in self.shards:
            with suppress(RuntimeError):  # it may be gone already
                finish(shard.link.send(header(Kind.LEAVE)))
            shard.link.close()
        self.shards = []

    def close(self, patience_s: float) -> None:
        """Leave, and see the shard that this rank started end."""
        self.leave()
        if self._process is not None:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _landed(self, heads: list[tuple[Beside, Tensor]]) -> int:
        ledger = self._port.ledger
        for shard, head in heads:
            if shard.rank == self._port.rank:
                ledger.hosted(int(head[2].item()))
        behind = max(int(head[1].item()) for _, head in heads)
        ledger.read(behind)
        ledger.refused = max(int(head[3].item()) for _, head in heads)
        return behind

    def _link(self, shard: int, token: bytes) -> Link:
        prefix = knock(self._store, shard, self._port.rank)
        link = Link(self._store, prefix, WORKER, self._port.timeout_s)
        prove(link, token)
        return link

    def _shares(self, tensors: Tensors) -> list[Tensors]:
        return shares(tensors, len(self.shards))

    def _staged(self, tensors: Tensors) -> Tensors:
        if self._staging is None:
            return tensors
        for host, device in zip(self._staging, tensors, strict=True):
            host.copy_(device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._staging

    def _away(self, shard: Beside, share: Tensors) -> int:
        """The bytes that leave this host on the way to or from a shard."""
        return 0 if shard.rank == self._home else sum(part.nbytes for part in share)


class Exchange(Pending[Any]):
    """A push or a pull under way, over several links."""

    def __init__(
        self,
        port: ProcessPort,
        works: list[tuple[Beside, list[Any]]],
        nbytes: int,
        land: Callable[[], Any],
        answer: bool = False,
    ) -> None:
        self._port = port
        self._works = works
        self._nbytes = nbytes
        self._land = land
        self._error: RankLost | None = None
        self._landed = False
        self._value: Any = None
        port.ledger.under_way(+1)
        if not answer:
            port.ledger.sent(nbytes)

    def done(self) -> bool:
        return self._landed

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> None:
        began = time.monotonic()
        for shard, works in self._works:
            for work in works:
                if self._error is None:
                    self._error = self._finish(shard, work, began + self._port.timeout_s)
        self._port.ledger.under_way(-1)
        if self._error is None:
            shaper = self._port.shaper
            if shaper is not None and not self._port.ledger.resting:
                time.sleep(max(0.0, shaper.deliver(self._nbytes) - time.monotonic()))
            self._value = self._land()
        self._landed = True
        self._port.ledger.waited(time.monotonic() - began)

    def _finish(self, shard: Beside, work: Any, deadline: float) -> RankLost | None:
        where = f"the parameter server's shard beside rank {shard.rank}"
        try:  # once: gloo takes the whole link down when a wait of its own runs out
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return None
        except RuntimeError as failed:
            if time.monotonic() > deadline:
                return RankLost(f"{where} did not answer for {self._port.timeout_s:.0f} s")
            return RankLost(f"{where} is gone: {failed}")


def meeting_place(store: dist.Store, rank: int) -> tuple[dist.Store, str, tuple[str, int]]:
    """A store that processes started later can reach too, its prefix, and its address.

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
    prefix = f"offbeat-server/{name}"
    return dist.PrefixStore(prefix, base), prefix, (host, int(port))


def shared_token(store: dist.Store, rank: int) -> bytes:
    """What proves that a worker belongs: from the environment, or drawn by rank 0."""
    if TOKEN in os.environ:
        return os.environ[TOKEN].encode()
    if rank == 0:
        store.set("server/token", secrets.token_hex(32))
    return store.get("server/token")
