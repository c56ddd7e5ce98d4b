"""The loops that people write: each a generator that trains a model and yields after every optimizer step.

The same generator runs under a strategy and, in one process and without Offbeat, as its reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel

Batch = tuple[Tensor, Tensor]
Optimizers = list[Optimizer]
Run = Callable[[nn.Module, Optimizers, Iterator[Batch], Any], Iterator[None]]
MICRO_BATCHES = 2
RATES = (0.05, 0.02)  # of matrices, and of the rest


def net(seed: int) -> nn.Module:
    """A model in float64, so that sums in another order agree to many digits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 5)
    ).double()


class Adversaries(nn.Module):
    """Two networks that are trained in turn; the loss of the first goes through the second."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.generator = nn.Linear(20, 20).double()
        self.critic = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices and the rest."""
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


# --- optimizers


def one(model: nn.Module) -> Optimizers:
    groups = [{"params": part, "lr": lr} for part, lr in zip(split(model), RATES, strict=True)]
    return [SGD(groups, momentum=0.9)]


def plain_sgd(model: nn.Module) -> Optimizers:
    groups = [{"params": part, "lr": lr} for part, lr in zip(split(model), RATES, strict=True)]
    return [SGD(groups)]


def of_groups(like: Callable[[nn.Module], Optimizers]) -> Callable[[nn.Module], Optimizers]:
    """An optimizer for each group of one."""
    return lambda model: [type(o)([g]) for o in like(model) for g in o.param_groups]


def of_parameters(model: nn.Module) -> Optimizers:
    rates = [lr for part, lr in zip(split(model), RATES, strict=True) for _ in part]
    params = [p for part in split(model) for p in part]
    return [SGD([p], lr=lr, momentum=0.9) for p, lr in zip(params, rates, strict=True)]


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices, rest = split(model)
    return [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-2)]


def sgd_and_adamw(model: nn.Module) -> Optimizers:
    matrices, rest = split(model)
    return [SGD(matrices, lr=0.05, momentum=0.9), AdamW(rest, lr=1e-2)]


def lbfgs(model: nn.Module) -> Optimizers:
    return [LBFGS(model.parameters(), lr=0.1, max_iter=3)]


def lbfgs_wolfe(model: nn.Module) -> Optimizers:
    return [LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")]


def of_adversaries(model: nn.Module) -> Optimizers:
    assert isinstance(model, Adversaries)
    return [SGD(model.generator.parameters(), lr=0.05), SGD(model.critic.parameters(), lr=0.1)]


# --- loops


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step_all(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def plain(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    for batch in data:
        loss_of(model, batch).backward()
        step_all(optimizers)
        yield


def micro_batches(batch: Batch) -> list[Batch]:
    return list(zip(batch[0].chunk(MICRO_BATCHES), batch[1].chunk(MICRO_BATCHES), strict=True))


def no_sync(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    for batch in data:
        *first, last = micro_batches(batch)
        with sync.no_sync():
            for micro in first:
                (loss_of(model, micro) / MICRO_BATCHES).backward()
        (loss_of(model, last) / MICRO_BATCHES).backward()
        step_all(optimizers)
        yield


def no_context(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    for batch in data:
        for micro in micro_batches(batch):
            (loss_of(model, micro) / MICRO_BATCHES).backward()
        step_all(optimizers)
        yield


def require_sync(
    model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any
) -> Iterator[None]:
    for batch in data:
        for i, micro in enumerate(micro_batches(batch)):
            sync.require_sync = i == MICRO_BATCHES - 1
            (loss_of(model, micro) / MICRO_BATCHES).backward()
        step_all(optimizers)
        yield


def closure(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    [optimizer] = optimizers
    for step, batch in enumerate(data):

        def evaluate(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure=evaluate)
        else:
            optimizer.step(evaluate)
        yield


def accumulating_closure(
    model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any
) -> Iterator[None]:
    [optimizer] = optimizers
    for batch in data:

        def evaluate(batch: Batch = batch) -> float:
            optimizer.zero_grad()
            *first, last = micro_batches(batch)
            with sync.no_sync():
                for micro in first:
                    (loss_of(model, micro) / MICRO_BATCHES).backward()
            (loss_of(model, last) / MICRO_BATCHES).backward()
            return 0.0

        optimizer.step(evaluate)
        yield


def in_backward(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}

    def step(param: Any) -> None:
        owner[param].step()
        owner[param].zero_grad()

    hooks = [param.register_post_accumulate_grad_hook(step) for param in owner]
    for batch in data:
        loss_of(model, batch).backward()
        yield
    for hook in hooks:
        hook.remove()


def scaler(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    """Scale by a power of two, which changes no digit; unscale all gradients before the first step."""
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in data:
        scaling.scale(loss_of(model, batch)).backward()
        for optimizer in optimizers:
            scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        for optimizer in optimizers:
            scaling.step(optimizer)
        scaling.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield


def scaler_that_skips(
    model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any
) -> Iterator[None]:
    """Accumulate scaled gradients; in the third step the first of them overflow, and no rank updates."""
    [optimizer] = optimizers
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, batch in enumerate(data):
        *first, last = micro_batches(batch)
        with sync.no_sync():
            for micro in first:
                loss = loss_of(model, micro) / MICRO_BATCHES
                scaling.scale(loss * math.inf if number == 2 else loss).backward()
        scaling.scale(loss_of(model, last) / MICRO_BATCHES).backward()
        before = [param.detach().clone() for param in model.parameters()]
        scaling.step(optimizer)
        if number == 2:
            assert all(map(torch.equal, before, model.parameters())), "it is skipped"
        scaling.update()
        optimizer.zero_grad()
        yield
    assert scaling.get_scale() == 512.0, "one step was skipped, and no other"


def compiled(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    yield from plain(torch.compile(model, backend="aot_eager"), optimizers, data, sync)  # type: ignore[arg-type]


def ema(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    shadow = AveragedModel(model)
    by_hand = [param.detach().clone() for param in model.parameters()]
    for number, _ in enumerate(plain(model, optimizers, data, sync)):
        shadow.update_parameters(model)
        for mean, param in zip(by_hand, model.parameters(), strict=True):
            mean.copy_(param if number == 0 else mean + (param - mean) / (number + 1))
        yield
    for mean, param in zip(by_hand, shadow.parameters(), strict=True):
        torch.testing.assert_close(mean, param.detach())


def in_turn(model: nn.Module, optimizers: Optimizers, data: Iterator[Batch], sync: Any) -> Iterator[None]:
    """The critic, then the generator, whose loss leaves gradients in the critic, too."""
    assert isinstance(model, Adversaries)
    of_generator, of_critic = optimizers
    for x, y in data:
        of_critic.zero_grad()
        fake = model.generator(x).detach()
        loss = nn.functional.cross_entropy(model.critic(x), y) - model.critic(fake).square().mean()
        loss.backward()
        of_critic.step()
        yield
        of_generator.zero_grad()
        model.critic(model.generator(x)).square().mean().backward()
        of_generator.step()
        yield


@dataclass(frozen=True)
class Loop:
    """A loop, its optimizers, and the loop that its reference runs."""

    run: Run = plain
    optimizers: Callable[[nn.Module], Optimizers] = one
    model: Callable[[int], nn.Module] = net
    like: str = ""  # the name of another loop that must come to the same; empty: itself
    exact: bool = False  # under a strategy, it equals that loop bit for bit


LOOPS = {
    "plain": Loop(),
    "two optimizers": Loop(optimizers=of_groups(one), like="plain", exact=True),
    "unlike optimizers": Loop(optimizers=sgd_and_adamw),
    "Muon + AdamW": Loop(optimizers=muon_and_adamw),
    "accumulation": Loop(no_sync, like="plain"),
    "accumulation, no context": Loop(no_context, like="plain"),
    "accumulation, require_sync": Loop(require_sync, like="plain"),
    "closure": Loop(closure, like="plain", exact=True),
    "closure that accumulates": Loop(accumulating_closure, like="plain"),
    "LBFGS": Loop(closure, lbfgs),
    "LBFGS, strong_wolfe": Loop(closure, lbfgs_wolfe),
    "optimizer in backward": Loop(in_backward, of_parameters, like="plain", exact=True),
    "GradScaler": Loop(scaler, of_groups(one), like="plain", exact=True),
    "GradScaler that skips, accumulation": Loop(scaler_that_skips),
    "torch.compile": Loop(compiled, like="plain"),
    "EMA": Loop(ema, like="plain", exact=True),
    "networks in turn": Loop(in_turn, of_adversaries, Adversaries),
}


# --- references, in one process


class NoSync:
    """Stands in for what attach returns."""

    require_sync = True

    def no_sync(self) -> Any:
        return nullcontext()


def batches(rank: int, steps: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
        yield x, torch.randint(5, (8,), generator=generator)


def _start(loop: Loop, data: Iterator[Batch]) -> tuple[nn.Module, Iterator[None]]:
    model = loop.model(0)
    return model, loop.run(model, loop.optimizers(model), data, NoSync())


def joined(loop: Loop, world: int, steps: int) -> nn.Module:
    """One worker whose batches are those of all."""

    def data() -> Iterator[Batch]:
        for parts in zip(*(batches(rank, steps) for rank in range(world)), strict=True):
            yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    model, running = _start(loop, data())
    for _ in running:
        pass
    return model


def averaged(period: int) -> Callable[[Loop, int, int], nn.Module]:
    """Workers that step locally and average their weights every `period` steps, and in the end."""

    def reference(loop: Loop, world: int, steps: int) -> nn.Module:
        started = [_start(loop, batches(rank, steps)) for rank in range(world)]
        models = [model for model, _ in started]
        for number, _ in enumerate(zip(*(running for _, running in started), strict=True), 1):
            if number % period == 0:
                _average(models)
        _average(models)
        return models[0]

    return reference


@torch.no_grad()
def _average(models: Sequence[nn.Module]) -> None:
    for params in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([p.detach() for p in params]).mean(0)
        for param in params:
            param.copy_(mean)


def one_after_the_other(loop: Loop, world: int, steps: int) -> nn.Module:
    """Workers that step in turn; a server adds 1/N of what each step changed, and answers with its sum."""
    started = [_start(loop, batches(rank, steps)) for rank in range(world)]
    server = [p.detach().clone() for p in loop.model(0).parameters()]
    for model, running in (each for _ in range(2 * steps) for each in started):
        before = [p.detach().clone() for p in model.parameters()]
        if next(running, "ended") == "ended":
            continue
        with torch.no_grad():
            for total, param, old in zip(server, model.parameters(), before, strict=True):
                total += (param - old) / world
                param.copy_(total)
    final = loop.model(0)
    with torch.no_grad():
        for param, total in zip(final.parameters(), server, strict=True):
            param.copy_(total)
    return final
