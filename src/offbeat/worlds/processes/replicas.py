"""Connection of a rank to other replicas, where a replica is several ranks or not all ranks take part."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from offbeat.core.members import Members
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.core.units import parse_rate
from offbeat.core.validation import fingerprint
from offbeat.errors import SettingError
from offbeat.worlds.processes.failure import ExitCount
from offbeat.worlds.processes.groups import Groups
from offbeat.worlds.processes.members import AveragingSession
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.processes.server.bootstrap import SERVER, connect_server
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.transport import ProcessServerClient

Connected = tuple[Session[Any], ProcessPort, bool, Callable[[], ProcessServerClient] | None]


def connect_replicas(
    groups: Groups,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy[Any],
    buffers: str,
    timeout_s: float,
    bandwidth: str | None,
    server: str | None,
    steps_per_epoch: int | None,
) -> Connected:
    """Connect to the ranks of `groups`; return the session, the port, False, and how to connect a server.

    Each rank trains its part of the model with the ranks that hold the same part, as if that were the model;
    a server's strategies have one server per part.
    """
    half = strategy.server_half()
    if half is not None and (server or os.environ.get(SERVER)):
        raise SettingError(
            f"server= or {SERVER} with group=: a server of `offbeat serve` holds one model, and each rank of "
            "a replica needs one of its own; without it, servers are started beside the workers"
        )
    device = next(model.parameters()).device
    connect_to = partial(connect_group, device, timeout_s=timeout_s)
    members = None
    if len(groups.members) > 1:
        agreed = {"strategy": repr(strategy), "replicas": str(len(groups.replicas))}
        members = connect_to(agreed, ranks=groups.members)
    local: Any = None
    stepped: Any = None
    trained, local_optimizer = model, optimizer
    if groups.sharded:
        from offbeat.worlds.processes.sharded.model import LocalModel  # slow to import: only where needed
        from offbeat.worlds.processes.sharded.optimizer import LocalOptimizer

        assert members is not None
        local = LocalModel(model, members)
        stepped = LocalOptimizer(optimizer, local)
        trained, local_optimizer = local.module, stepped.local
    description = fingerprint(trained, local_optimizer, strategy, buffers) | groups.description
    replica = Replica(trained, buffers, local_optimizer, strategy.layout(trained), steps_per_epoch)
    bits_per_s = parse_rate(bandwidth) if bandwidth else None
    port = connect_to(description, bits_per_s=bits_per_s, ranks=groups.replicas)
    port.members = members
    port.exits = ExitCount(dist.PrefixStore("offbeat/exits", _get_default_store()), dist.get_rank() == 0)
    session: Session[Any]
    if local is not None:
        from offbeat.worlds.processes.sharded.session import ShardedSession

        session = ShardedSession(strategy, replica, port, port.ledger, local, stepped)
    elif members is not None:
        session = AveragingSession(strategy, replica, port, port.ledger)
    else:
        replica.members = Members(global_rank=port.global_rank)
        session = Session(strategy, replica, port, port.ledger)
    if half is None:
        return session, port, False, None
    spec = ServerSpec.of(strategy, replica, description, timeout_s)
    weights = replica.weights
    return session, port, False, lambda: connect_server(port, spec, half, weights, None)
