"""The user's side of the tests: small models and plain training loops, as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from tests.support.limits import HANG_S

Make = Callable[[nn.Module], torch.optim.Optimizer]


def mlp(seed: int = 0) -> nn.Module:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats three tracebacks per call
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


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two optimizers of unlike classes, each for a part of every layer."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "momentum": momentum, "adamw": adamw, "pair": pair}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    data: Any,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    no_sync: Callable[[], Any] = nullcontext,
    scheduler: Any = None,
    scaler: Any = None,
    autocast: bool = False,
    set_to_none: bool = True,
    samples: Callable[[int], None] = lambda count: None,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """The loop as anybody writes it; `no_sync` is DDP's or ours."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for i, (x, y) in enumerate(data):
        last = (i + 1) % accumulate == 0
        samples(len(x))
        with nullcontext() if last else no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(x), y) / accumulate
            scaler.scale(loss).backward()
        if last:
            if clip is not None:
                for each in optimizers:
                    scaler.unscale_(each)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            for each in optimizers:
                each.zero_grad(set_to_none)
            if scheduler is not None:
                scheduler.step()
            after_step((i + 1) // accumulate)


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
    with offbeat.attach(net, opt, strategy, timeout_s=HANG_S) as sync:
        train(net, opt, batches(rank, steps), no_sync=sync.no_sync, samples=sync.samples, **options)
        metrics = sync.metrics
        sync.close(publish=False)  # each rank's own weights are looked at
    return net, metrics


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
