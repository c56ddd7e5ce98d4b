"""Specifications of a parameter server: of all shards together, and of one shard's process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError
from offbeat.server.apply import MakeApply, make_apply
from offbeat.server.messages import Tensors
from offbeat.server.optimizer_spec import OptimizerSpec, spec_for
from offbeat.server.pieces import pieces_for
from offbeat.server.sharding import ShardState, shard_bounds
from offbeat.strategies import path_of
from offbeat.worlds.processes.rendezvous import Fingerprint
from offbeat.worlds.processes.server.auth import sign, verify
from offbeat.worlds.processes.server.wire import PROTOCOL

SPEC = "spec"  # the key in the store
OWN = ("shard", "sizes", "optimizer", "snapshot", "second", "follows")  # of each shard in a process
MOST_NUMEL = 1 << 40  # elements of a model
SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "params")  # settings that schedules change, and others


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """Configuration of a shard's process, passed on its command line as JSON."""

    host: str
    tcp_port: int  # of the store at `host`
    prefix: str  # of the shard's keys in the store
    shard: int
    parent: int  # process id of the supervisor
    workers: int  # number of workers that must join before training begins
    local_workers: list[int]  # on this host: weights sent to them do not leave the NIC
    strategy: str  # its name, or the path of a class from outside
    settings: dict[str, Any]
    sizes: list[tuple[str, int]]  # the flat tensors of this shard: dtype and number of elements
    timeout_s: float
    optimizer: dict[str, Any] | None = None  # an `OptimizerSpec` if workers push gradients
    snapshot: str  # path of the file
    snapshot_s: float  # seconds between snapshots
    second: int | None = None  # the shard that keeps a copy of this one's state
    follows: dict[str, Any] | None = None  # sizes and optimizer of the shard whose copy this one keeps
    insecure: bool = False  # whether connections from other hosts are not encrypted
    dedicated: bool = (
        False  # started by `offbeat serve`: waits for workers to return, never deletes its snapshot
    )
    siblings: list[dict[str, Any]] = field(default_factory=list)  # what differs for others in the process

    @property
    def silence_s(self) -> float:
        """Seconds that a worker may send nothing while others wait for it: less than the timeout of those."""
        return self.timeout_s / 2

    @property
    def report_size(self) -> int:
        """Number of values that the optimizer needs with each push: learning rates and marks."""
        return len(self.optimizer["groups"]) + self.optimizer["marks"] if self.optimizer else 0

    @cached_property
    def state_parts(self) -> int:
        """Number of parts of the optimizer's state."""
        return len(OptimizerSpec(**self.optimizer).state_names()) if self.optimizer else 0

    def of_process(self) -> list[ShardConfig]:
        """Return the configurations of all shards in the process."""
        own = replace(self, siblings=[])
        return [own, *(replace(own, **sibling) for sibling in self.siblings)]

    def of_followed(self) -> ShardConfig:
        """Return the configuration of the shard whose copy this one keeps, as far as the copy needs it."""
        assert self.follows is not None
        return replace(self, follows=None, **self.follows)

    def make_apply(self) -> MakeApply:
        """Return a factory of the function that applies pushes to the weights."""
        return make_apply(OptimizerSpec(**self.optimizer) if self.optimizer else None)

    def fits(self, state: ShardState) -> bool:
        """Return whether a saved state is one of this shard."""
        sizes = [(str(weight.dtype).removeprefix("torch."), weight.numel()) for weight in state.weights]
        same = sizes == [tuple(size) for size in self.sizes]
        return same and len(state.optimizer) in (0, self.state_parts)

    def buffers(self) -> Tensors:
        """Allocate tensors of this shard's sizes."""
        return [torch.zeros(numel, dtype=getattr(torch, dtype)) for dtype, numel in self.sizes]


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Specification of a server: model and strategy. The first worker publishes it, signed with the token."""

    strategy: str
    settings: dict[str, Any]
    flats: list[tuple[str, int]]  # dtype and number of elements of each flat tensor
    optimizer: dict[str, Any] | None  # an `OptimizerSpec` of all flat tensors if workers push gradients
    description: Fingerprint
    timeout_s: float
    cuts_anywhere: bool = True  # whether more shards cost no bytes, and each applies a push at once
    wire_ratio: float = 1.0  # of a push or of pulled weights, whichever is larger, to the weights' bytes

    @classmethod
    def of(
        cls, strategy: Strategy[Any], replica: Replica, description: Fingerprint, timeout_s: float
    ) -> ServerSpec:
        half = strategy.server_half()
        optimizer = spec_for(half, replica) if half is not None else None
        description = {**description, **_optimizer_lines(replica), "server protocol": str(PROTOCOL)}
        return cls(
            strategy=path_of(type(strategy)),
            settings=strategy.settings(),
            flats=[(str(w.dtype).removeprefix("torch."), w.numel()) for w in replica.weights],
            optimizer=asdict(optimizer) if optimizer is not None else None,
            description=description,
            timeout_s=timeout_s,
            cuts_anywhere=half is None or half.cuts_anywhere,
            wire_ratio=1.0 if half is None else half.wire_ratio,
        )

    @property
    def state_parts(self) -> int:
        """Number of parts of the state of the server's optimizer."""
        return len(OptimizerSpec(**self.optimizer).state_names()) if self.optimizer else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(numel * getattr(torch, dtype).itemsize for dtype, numel in self.flats)

    def pieces(self, hosts: int, workers: int, bytes_per_s: float) -> int:
        """Return the number of shards on each host, by what travels and the rate of the links."""
        if not self.cuts_anywhere:
            return 1
        return pieces_for(self.nbytes * self.wire_ratio, hosts, workers, bytes_per_s)

    def process_config(
        self, number: int, processes: int, pieces: int, *, snapshots: Path, **where: Any
    ) -> ShardConfig:
        """Return the configuration of one of the server's processes, with `pieces` shards in each."""
        first, *others = [
            self.shard_config(
                shard, processes * pieces, pieces, snapshot=str(snapshots / f"shard-{shard}"), **where
            )
            for shard in range(number * pieces, (number + 1) * pieces)
        ]
        return replace(first, siblings=[{name: getattr(other, name) for name in OWN} for other in others])

    def shard_config(
        self, shard: int, shards: int, pieces: int = 1, *, replicate: bool = False, **where: Any
    ) -> ShardConfig:
        """Return the configuration of one shard; `replicate`: one of the next host keeps a copy of it."""
        return ShardConfig(
            shard=shard,
            parent=os.getpid(),
            strategy=self.strategy,
            settings=self.settings,
            timeout_s=self.timeout_s,
            second=(shard + pieces) % shards if replicate else None,
            follows=self._part((shard - pieces) % shards, shards) if replicate else None,
            **self._part(shard, shards),
            **where,
        )

    def _part(self, shard: int, shards: int) -> dict[str, Any]:
        """Return the sizes of one shard's tensors, and its part of the optimizer."""
        bounds = shard_bounds([numel for _, numel in self.flats], shard, shards)
        spec = OptimizerSpec(**self.optimizer) if self.optimizer else None
        return {
            "sizes": [
                (dtype, high - low) for (dtype, _), (low, high) in zip(self.flats, bounds, strict=True)
            ],
            "optimizer": asdict(spec.for_shard(bounds)) if spec else None,
        }

    def signed(self, token: bytes) -> str:
        """Return the specification as JSON, after its signature with the token."""
        return sign(token, SPEC, json.dumps(asdict(self), sort_keys=True))

    @classmethod
    def read(cls, signed: bytes, token: bytes) -> ServerSpec:
        """Read a signed specification; refuse one that is signed with another token."""
        text = verify(token, SPEC, signed)
        try:
            spec = cls(**json.loads(text))
            sizes = [numel for dtype, numel in spec.flats if getattr(torch, dtype).is_floating_point]
            valid = len(sizes) == len(spec.flats) and all(type(numel) is int for numel in sizes)
        except (ValueError, TypeError, AttributeError, RecursionError) as malformed:
            raise OffbeatError(f"the specification of the server is malformed: {malformed}") from None
        if not valid:
            raise OffbeatError("the specification of the server is malformed: not a list of flat tensors")
        if not all(0 <= numel <= MOST_NUMEL for numel in sizes):
            raise OffbeatError("the specification of the server describes a model that is too large")
        return spec


def _optimizer_lines(replica: Replica) -> Fingerprint:
    """Describe the optimizer's settings that all workers of a server must share.

    Learning rates are those that schedules start from: a worker that returns late is not refused because the
    others' rates have changed meanwhile.
    """
    lines = {}
    for number, group in enumerate(replica.optimizer.groups, 1):
        if "lr" in group:  # an optimizer of one's own may have none
            lines[f"learning rate of group {number}"] = f"{float(group.get('initial_lr', group['lr'])):g}"
        lines[f"settings of group {number}"] = str(
            {key: value for key, value in sorted(group.items()) if key not in SCHEDULED}
        )
    return lines
