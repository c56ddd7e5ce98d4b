"""Runs of four ranks as two replicas: of two parts each by FSDP2, or of two copies each that average inside.

The same data train two unsharded replicas, on two ranks: a batch of a replica is cut in halves for its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import offbeat
from tests.conformance.table import AnyStrategy
from tests.support.limits import HANG_S

BATCH = 8
Run = tuple[list[Tensor], list[Tensor]]


@cache
def mesh() -> DeviceMesh:
    """Return the mesh of a crew of four: two replicas of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def uneven() -> nn.Module:
    """Return a model whose parameters cannot be halved: some ranks hold less of them, or nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))


def blocks_of_any_size() -> nn.Module:
    """Return a model of several blocks, of which the two ranks of a replica hold unequal parts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 21), nn.Tanh(), nn.Linear(21, 33), nn.Tanh(), nn.Linear(33, 1))


def even() -> nn.Module:
    """Return four equal layers: cuts of the flat weights are between layers, sharded or not."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(4)), nn.Identity()
    )


def twice() -> nn.Module:
    """Return a model that uses a layer twice: FSDP2 reduces its gradient twice."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 5), inner, inner, nn.Linear(5, 1))


def batch(model: nn.Module, step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Draw a replica's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    x = torch.randn(BATCH, width, generator=generator)
    return x, x.sin() if width == 16 else x.sin().sum(1, keepdim=True)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def shard(model: nn.Module, over: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard each layer but the last, then the rest, over the two ranks of this rank's replica.

    FSDP2 keeps the weights of the rest gathered after a forward.
    """
    over = over or mesh()["shard"]
    for layer in dict.fromkeys(list(model.children())[:-1]):
        if list(layer.parameters()):
            fully_shard(layer, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def whole(model: nn.Module) -> list[Tensor]:
    """Return a copy of all weights, gathered from their parts."""
    tensors = [p.detach() for p in model.parameters()]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for t in tensors]


def step(
    model: nn.Module, optimizer: Optimizer, sync: Any, number: int, place: tuple[int, int, int], clip: float
) -> None:
    """Train one step; `place`: the replica, the rank in it, and how many ranks it has."""
    replica, rank, ranks = place
    x, y = (t.chunk(ranks)[rank] for t in batch(model, number, replica))
    optimizer.zero_grad()
    sync.samples(len(x))
    loss = ((model(x) - y) ** 2).mean()
    sync.loss(loss)
    loss.backward()
    if clip:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def place_of(ranks: int) -> tuple[int, int, int]:
    return (*divmod(dist.get_rank(), ranks), ranks)


@contextmanager
def in_turn(replica: int, sync: Any) -> Iterator[None]:
    """Let the second replica in when the first has left: where nobody waits, the order of pushes counts."""
    if replica == 1:
        dist.barrier()
    yield
    sync.settle()
    if replica == 0:
        dist.barrier()
    dist.barrier()


def trained(
    strategy: AnyStrategy,
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], Optimizer],
    how: str = "plain",
    steps: int = 50,
    clip: float = 0.0,
    evaluate_every: int = 0,
) -> Run:
    """Train; return the weights that all ranks published in the end, and this replica's own.

    how: "plain" on two ranks; "sharded" or "inner" on four
    """
    model = build()
    groups: dict[str, Any] = {}
    if how != "plain":
        groups["group"] = mesh()["replica"]
    if how == "sharded":
        shard(model)
    elif how == "inner":
        groups["inner"] = mesh()["shard"].get_group()
    optimizer = make(model)
    place = place_of(1 if how == "plain" else 2)
    with offbeat.attach(model, optimizer, strategy, timeout_s=HANG_S, **groups) as sync:
        for number in range(steps):
            with in_turn(place[0], sync) if isinstance(strategy, offbeat.ASP) else nullcontext():
                step(model, optimizer, sync, number, place, clip)
            if evaluate_every and number % evaluate_every == 0:
                with sync.consensus(), torch.no_grad():
                    model(batch(model, 0, 0)[0])
        sync.settle()
        with sync.consensus():
            published = whole(model)
        own = whole(model)
    assert farthest(published, whole(model)) == 0, "close() publishes what consensus() shows"
    return published, own


def farthest(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the greatest difference of two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))
