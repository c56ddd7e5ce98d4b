"""Connection of a rank to other replicas, where a replica is several ranks or not all ranks take part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from offbeat.core.members import Members
from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.core.validation import fingerprint
from offbeat.errors import SettingError
from offbeat.worlds.processes.connection import Connected, Options, disconnect, server_of
from offbeat.worlds.processes.failure import ExitCount
from offbeat.worlds.processes.groups import Groups
from offbeat.worlds.processes.members import AveragingSession
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.processes.server.bootstrap import SERVER


def connect_replicas(
    groups: Groups,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: Strategy[Any],
    options: Options,
    undo: ExitStack,
) -> Connected:
    """Connect to the ranks of `groups`. `undo` takes what is to be undone on failure.

    Each rank trains its part of the model with the ranks that hold the same part, as if that were the model;
    a server's strategies have one server per part.
    """
    if strategy.server_half() is not None and options.server:
        raise SettingError(
            f"server= or {SERVER} with group=: a server of `offbeat serve` holds one model, and each rank of "
            "a replica needs one of its own; without it, servers are started beside the workers"
        )
    connect_to = partial(connect_group, next(model.parameters()).device, timeout_s=options.timeout_s)
    members = None
    if len(groups.members) > 1:
        agreed = {"strategy": repr(strategy), "replicas": str(len(groups.replicas))}
        members = connect_to(agreed, ranks=groups.members)
        undo.callback(disconnect, members)
    local: Any = None
    stepped: list[Any] = []
    trained, local_optimizers = model, optimizers
    if groups.sharded:
        from offbeat.worlds.processes.sharded.model import LocalModel  # slow to import: only where needed
        from offbeat.worlds.processes.sharded.optimizer import LocalOptimizer

        assert members is not None
        local = LocalModel(model, members)
        stepped = [LocalOptimizer(optimizer, local) for optimizer in optimizers]
        trained, local_optimizers = local.module, [each.local for each in stepped]
    description = fingerprint(trained, local_optimizers, strategy, options.buffers) | groups.description
    layout = strategy.layout(trained)
    replica = Replica(trained, options.buffers, local_optimizers, layout, options.steps_per_epoch)
    undo.callback(_release, replica, local)
    port = connect_to(description, bits_per_s=options.bits_per_s, ranks=groups.replicas)
    port.members = members
    undo.callback(disconnect, port)
    port.exits = ExitCount(dist.PrefixStore("offbeat/exits", _get_default_store()), dist.get_rank() == 0)
    undo.callback(port.exits.count)
    session: Session[Any]
    if local is not None:
        from offbeat.worlds.processes.sharded.session import ShardedSession

        session = ShardedSession(strategy, replica, port, port.ledger, local, stepped)
    elif members is not None:
        session = AveragingSession(strategy, replica, port, port.ledger)
    else:
        replica.members = Members(global_rank=port.global_rank)
        session = Session(strategy, replica, port, port.ledger)
    return Connected(session, port, server_of(session, port, description, options))


def _release(replica: Replica, local: Any) -> None:
    with torch.no_grad():
        replica.release()
        if local is not None:
            local.release()
