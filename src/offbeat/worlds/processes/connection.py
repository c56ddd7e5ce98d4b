"""Connection of a rank to the others, and to a server where the strategy has one, as `attach` asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from offbeat.core.replica import Replica
from offbeat.core.session import Session
from offbeat.core.strategy import Strategy
from offbeat.core.validation import fingerprint
from offbeat.worlds.processes.elastic.connect import connect_elastic
from offbeat.worlds.processes.elastic.port import ElasticPort
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import connect_group, connect_standalone
from offbeat.worlds.processes.server.bootstrap import Rendezvous, connect_server, required_token
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.transport import ProcessServerClient


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a connection, as `attach` was told."""

    buffers: str
    timeout_s: float
    bits_per_s: float | None
    server: str | None
    steps_per_epoch: int | None
    insecure: bool
    elastic: bool = False
    minimum: int = 1


@dataclass(frozen=True)
class Connected:
    """A session and its port; where the strategy has a server, a function that connects to it."""

    session: Session[Any]
    port: ProcessPort | ElasticPort
    connect_server: Callable[[], ProcessServerClient] | None = None


def connect_workers(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: Strategy[Any],
    options: Options,
    undo: ExitStack,
) -> Connected:
    """Connect to all other ranks, each with the whole model. `undo` takes what is to be undone on failure."""
    description = fingerprint(model, optimizers, strategy, options.buffers)
    layout = strategy.layout(model)
    replica = Replica(model, options.buffers, optimizers, layout, options.steps_per_epoch)
    undo.callback(_release, replica)
    timeout_s, bits_per_s = options.timeout_s, options.bits_per_s
    if options.elastic:
        return Connected(*connect_elastic(strategy, replica, description, options.minimum, timeout_s))
    rendezvous = None
    if options.server and strategy.server_half() is not None:
        rendezvous = Rendezvous.at(options.server, required_token(), timeout_s)
    if rendezvous is not None and not dist.is_initialized() and "RANK" not in os.environ:
        workers = rendezvous.number("workers")
        port = connect_standalone(rendezvous.store, rendezvous.worker, workers, timeout_s, bits_per_s)
    else:
        port = connect_group(replica.weights[0].device, description, timeout_s, bits_per_s)
    undo.callback(disconnect, port)
    session = Session(strategy, replica, port, port.ledger)
    return Connected(session, port, server_of(session, port, description, options, rendezvous))


def server_of(
    session: Session[Any],
    port: ProcessPort,
    description: dict[str, str],
    options: Options,
    rendezvous: Rendezvous | None = None,
) -> Callable[[], ProcessServerClient] | None:
    """Return a function that connects to the strategy's server; None if the strategy has none."""
    half, weights = session.strategy.server_half(), session.replica.weights
    if half is None:
        return None
    spec = ServerSpec.of(session.strategy, session.replica, description, options.timeout_s)
    return lambda: connect_server(port, spec, half, weights, rendezvous, options.insecure)


def disconnect(port: ProcessPort) -> None:
    """Close a port after a failure, which is the error to show: those of closing are not."""
    port.abandon()
    with suppress(Exception):
        port.close()


def _release(replica: Replica) -> None:
    with torch.no_grad():
        replica.release()
