"""Servers of groups under test: workers that push and pull by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat import GSSP, SSP
from offbeat.server.messages import Join, JoinAck, Pull, PullReply, Push
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState


def serving(strategy: SSP | GSSP, workers: int, weights: Tensor | None = None) -> ParameterServer:
    """Return a shard of a strategy's server that these workers have joined."""
    held = torch.zeros(3) if weights is None else weights.clone()
    server = ParameterServer(ShardState([held]), strategy.server_half())
    for worker in range(workers):
        assert server.handle(Join(worker=worker)) == [JoinAck(worker=worker, clock=0)]
    return server


def push(server: ParameterServer, worker: int, clock: int, value: float, spent_s: float = 1.0) -> None:
    """Push an update of equal entries, which the server accepts."""
    update = [torch.full((3,), value)]
    (receipt,) = server.handle(Push(worker=worker, clock=clock, update=update, spent_s=spent_s))
    assert receipt.worker == worker


def reads(server: ParameterServer, worker: int, clock: int | None) -> float | None:
    """Return the first weight that a pull reads at once; None: the worker has to wait."""
    for answer in server.handle(Pull(worker=worker, clock=clock)):
        if isinstance(answer, PullReply) and answer.worker == worker:
            return answer.weights[0][0].item()
    return None


def paced(server: ParameterServer, steps: int, spent_s: dict[int, float], after: dict[int, int]) -> None:
    """Let all workers push and pull, in turn, `steps` more times; `after` counts their clocks."""
    for _ in range(steps):
        for worker, seconds in spent_s.items():
            after[worker] += 1
            push(server, worker, after[worker], 1.0, seconds)
            reads(server, worker, after[worker])
