"""Do all strategies run on a GPU, and what does attach() add there?

    python -m benchmarks run gpu [--data FOLDER]

On one GPU: a single rank on NCCL must equal the bare loop bit for bit. Two gloo ranks that share the GPU must
equal DDP. A strategy that never communicates is timed against the bare loop. Virtual workers train there too
(`--device cuda`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.options import add_data_option, benchmark_parser
from benchmarks.support.tables import Table, interval
from offbeat.experiments.job import Job
from offbeat.experiments.tasks import task
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import load_cluster

EXACT = [  # on two ranks: equal to DDP, bit for bit
    offbeat.OSP(budget=0),
    offbeat.SSDSGD(warmup=1000),
    offbeat.SelSync(delta=0.0, aggregate="gradients"),
]
SINGLE = [  # on one rank: equal to the bare loop, bit for bit
    offbeat.BSP(),
    offbeat.LocalSGD(period=4),
    offbeat.OSP(budget=0.8),
    offbeat.SelSync(delta=0.1, window=3),
]
CLOSE = [offbeat.SSP(staleness=0)]  # equal to DDP but for rounding
FINITE = [  # not comparable: must run and stay finite
    offbeat.OSP(budget=0.8, growth=0),
    offbeat.OSP(growth=5),
    offbeat.SSDSGD(warmup=5, delay=3),
    offbeat.SelSync(delta=0.1, window=3),
    offbeat.SSP(staleness=3),
    offbeat.SSP(staleness=0, push="gradient"),  # the server's momentum steps once per push: not BSP
    offbeat.ASP(),
    offbeat.ASP(codec=offbeat.ErrorFeedback(offbeat.TopK(0.1))),
    offbeat.SSDSGD(warmup=5, delay=3, on="server"),
    offbeat.OSP(budget=0.8, growth=0, on="server"),
    offbeat.GSSP(sparse=offbeat.GDTopK(epoch_steps=5)),
    offbeat.Oscars(),
    offbeat.DiLoCo(period=4, fragments=2, delay=1),
    offbeat.BSP(codec=offbeat.ErrorFeedback(offbeat.TopK(0.1))),
    offbeat.BSP(codec=offbeat.PowerSGD(4)),
    offbeat.BSP(codec=offbeat.Quantize(8)),
    offbeat.LocalSGD(period=4, codec=offbeat.Half()),
]
SILENT = offbeat.LocalSGD(period=1_000_000_000)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int = 0, batch: int = 256
) -> None:
    """Train on random images, drawn from the rank's own generator."""
    generator = torch.Generator("cuda").manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(batch, 1, 28, 28, device="cuda", generator=generator)
        y = torch.randint(10, (batch,), device="cuda", generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.cuda.synchronize()


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model on the GPU, from the same seed each time, and its optimizer."""
    torch.manual_seed(0)
    what = task("fashion-mnist", model=name)
    model = what.build().cuda()
    return model, what.optimizer(model)


def flatten(model: nn.Module) -> torch.Tensor:
    """Copy all parameters into one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check_two_ranks(rank: int, store: str) -> None:
    """Compare strategies with DDP, as one of two gloo ranks on one GPU."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    theirs, their_optimizer = build("mlp")
    train(DistributedDataParallel(theirs), their_optimizer, 30, rank)
    ours, our_optimizer = build("mlp")
    with offbeat.attach(ours, our_optimizer, offbeat.BSP()):
        train(ours, our_optimizer, 30, rank)
    assert torch.equal(flatten(theirs), flatten(ours)), "BSP differs from DDP"
    for strategy in EXACT + CLOSE + FINITE:
        model, optimizer = build("mlp")
        with offbeat.attach(model, optimizer, strategy, timeout_s=60) as sync:
            train(model, optimizer, 30, rank)
            sync.settle()
            with sync.consensus():
                end = flatten(model)
        assert strategy not in EXACT or torch.equal(flatten(theirs), end), f"{strategy} differs from DDP"
        if strategy in CLOSE:
            torch.testing.assert_close(flatten(theirs), end, rtol=1e-3, atol=1e-4)
        assert end.isfinite().all(), f"{strategy}: weights are not finite"
    dist.destroy_process_group()


def _names(strategies: list[Any]) -> str:
    return ", ".join(map(str, strategies))


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("gpu", __doc__)
    add_data_option(parser)
    options = parser.parse_args(arguments)
    torch.backends.cudnn.deterministic = True
    table = Table(
        "gpu", __doc__ or "", ["what", "model", "bare ms", "attached ms", "difference µs", "middle half"]
    )
    table.note(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for strategy in SINGLE:
        bare, bare_optimizer = build("cnn")
        train(bare, bare_optimizer, 20)
        model, optimizer = build("cnn")
        with offbeat.attach(model, optimizer, strategy):
            train(model, optimizer, 20)
        assert torch.equal(flatten(bare), flatten(model)), f"{strategy} differs from the bare loop"
    table.note(f"one rank on NCCL equals the bare loop, bit for bit, over 20 steps, under {_names(SINGLE)}")
    for name in ("mlp", "cnn"):
        bare, bare_optimizer = build(name)
        model, optimizer = build(name)
        pairs = []
        with offbeat.attach(model, optimizer, SILENT):
            for round_ in range(32):
                seconds = {}
                for turn in (0, 1) if round_ % 2 else (1, 0):
                    start = time.perf_counter()
                    train(*((bare, bare_optimizer), (model, optimizer))[turn], 50)
                    seconds[turn] = (time.perf_counter() - start) / 50
                pairs.append((seconds[0], seconds[1]))
        extra_us = [1e6 * (b - a) for a, b in pairs[2:]]
        table.row(
            "attach",
            name,
            f"{1e3 * statistics.median(a for a, _ in pairs):.3f}",
            f"{1e3 * statistics.median(b for _, b in pairs):.3f}",
            f"{statistics.median(extra_us):.0f}",
            interval(extra_us),
        )
    mp.spawn(check_two_ranks, args=(f"{Path.cwd()}/.gpu-store",), nprocs=2)
    Path(".gpu-store").unlink(missing_ok=True)
    table.note(f"two gloo ranks on the GPU, 30 steps: equal to DDP, bit for bit: BSP, {_names(EXACT)}")
    table.note(f"equal to DDP but for rounding: {_names(CLOSE)}; run and stay finite: {_names(FINITE)}")
    for name, workers, steps in (("digits", 16, 100), ("fashion-mnist", 16, 200)):
        what = task(name)
        if name != "digits" and options.data is None:
            continue
        data = what.load(options.data).to("cuda")
        job = Job(task=what, strategy=offbeat.LocalSGD(period=8), workers=workers, steps=steps)
        start = time.perf_counter()
        last = simulate(job, load_cluster("lan-1g"), data, device="cuda")[-1]
        took = time.perf_counter() - start
        table.note(
            f"virtual time on the GPU: {name}, {workers} workers, {steps} steps: {took:.1f} s, "
            f"{workers * steps / took:.0f} worker-steps per second; accuracy {last.value:.4f}"
        )
    table.write()
