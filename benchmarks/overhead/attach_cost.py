"""What does attaching cost?

    python -m benchmarks.attach_cost

The bare loop against the same loop with a strategy attached that never communicates, in one process, in
alternating rounds: at most 1% of a step of the CNN, under 150 µs a step of the MLP. And the memory of all
tensors after some steps: BSP may hold one copy of the gradients more than the bare loop.
"""

from __future__ import annotations

import gc
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.tables import Table, interval
from offbeat.tasks import task

ROUNDS = {"mlp": 300, "cnn": 300}
STEPS = {"mlp": 10, "cnn": 1}  # short turns: the machine's speed drifts
SILENT = offbeat.LocalSGD(period=1_000_000_000)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
    """Mean seconds of a step."""
    x, y = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    began = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return (time.perf_counter() - began) / count


def tensor_bytes() -> int:
    """What all live tensors hold, each memory counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if thing.grad is not None:
                storage = thing.grad.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = Table(
        "attach-cost",
        __doc__ or "",
        ["model", "bare ms", "attached ms", "difference µs", "of a step", "middle half µs", "goal"],
    )
    for name, goal in (("mlp", "< 150 µs"), ("cnn", "≤ 1%")):
        what = task("fashion-mnist", model=name)
        bare, attached = what.build(), what.build()
        bare_optimizer, optimizer = what.optimizer(bare), what.optimizer(attached)
        pairs = []
        with offbeat.attach(attached, optimizer, SILENT):
            for round_ in range(ROUNDS[name] + 2):
                turns = [(bare, bare_optimizer), (attached, optimizer)]
                order = (0, 1) if round_ % 2 else (1, 0)
                seconds = {turn: steps(*turns[turn], STEPS[name]) for turn in order}
                pairs.append((seconds[0], seconds[1]))
        pairs = pairs[2:]
        extra_us = [1e6 * (b - a) for a, b in pairs]
        share = statistics.median(extra_us) / (1e6 * statistics.median(a for a, _ in pairs))
        table.row(
            name,
            f"{1e3 * statistics.median(a for a, _ in pairs):.3f}",
            f"{1e3 * statistics.median(b for _, b in pairs):.3f}",
            f"{statistics.median(extra_us):.0f}",
            f"{share:.2%}",
            interval(extra_us),
            goal,
        )
        del bare, attached, bare_optimizer, optimizer
    for strategy in (None, SILENT, offbeat.BSP()):
        before = tensor_bytes()
        what = task("fashion-mnist", model="mlp")
        model = what.build()
        optimizer = what.optimizer(model)
        size = sum(p.nbytes for p in model.parameters())
        sync = offbeat.attach(model, optimizer, strategy) if strategy else None
        steps(model, optimizer, 3)
        held = (tensor_bytes() - before) / size
        name = strategy.name if strategy else "bare loop"
        table.note(
            f"memory after 3 steps, {name}: {held:.3f} times the weights (weights, gradients, momentum)"
        )
        if sync is not None:
            sync.close()
        del model, optimizer, sync
    table.write()


if __name__ == "__main__":
    main()
