"""The user's side of the tests: small models and plain training loops, as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import offbeat

Make = Callable[[nn.Module], torch.optim.Optimizer]


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))


def batches(rank: int, steps: int, size: int = 8, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Other data on every rank, the same on every call."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        x = torch.randn(size, 20, generator=generator)
        yield x, torch.randint(5, (size,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


OPTIMIZERS = {"sgd": sgd, "momentum": momentum, "adamw": adamw}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    no_sync: Callable[[], Any] = nullcontext,
    scheduler: Any = None,
) -> None:
    """The loop as anybody writes it; `no_sync` is DDP's or ours."""
    for i, (x, y) in enumerate(data):
        last = (i + 1) % accumulate == 0
        with nullcontext() if last else no_sync():
            (nn.functional.cross_entropy(model(x), y) / accumulate).backward()
        if last:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()


def attached(
    rank: int,
    strategy: offbeat.Strategy[Any],
    optimizer: str = "sgd",
    steps: int = 12,
    *,
    model: Callable[[int], nn.Module] = mlp,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Train under a strategy; the model afterwards, and the metrics."""
    net = model(rank)  # each rank its own weights: attach must give them all rank 0's
    opt = OPTIMIZERS[optimizer](net)
    with offbeat.attach(net, opt, strategy, timeout_s=60) as sync:
        train(net, opt, batches(rank, steps), no_sync=sync.no_sync, **options)
        metrics = sync.metrics
    return net, metrics


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
