"""How long is a step on a GPU under each strategy, against DDP and against computing alone?

    python -m benchmarks run gpu_step [--ranks 4] [--steps 20] [--compile] [--only NAME …]

GPT-2 small (124 million parameters), bfloat16 autocast, AdamW. All ranks share one GPU and exchange over
gloo, so what is exchanged passes through the host's memory and the loopback interface: the figures compare
strategies on a machine without NVLink or NCCL, and say nothing of NCCL. With `--compile`, torch.compile
compiles the model: `--ranks 1 --compile` shows whether a wrapper or hooks break its graph.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 50_257, 768, 12, 12, 512, 8
WARM_UP = 8
BARE, DDP = "the bare loop", "DDP"
CONTENDERS: dict[str, offbeat.Strategy | None] = {
    BARE: None,
    "computing alone": offbeat.LocalSGD(period=10**9),
    DDP: None,
    "BSP": offbeat.BSP(),
    "OSP": offbeat.OSP(growth=4),
    "SSDSGD": offbeat.SSDSGD(warmup=2),
    "SSP": offbeat.SSP(),
    "DiLoCo(period=8)": offbeat.DiLoCo(period=8),
    "DiLoCo(period=8, fragments=4, delay=1)": offbeat.DiLoCo(period=8, fragments=4, delay=1),
    "BSP, TopK 1%": offbeat.BSP(codec=offbeat.ErrorFeedback(offbeat.TopK(0.01))),
}


class GPT(nn.Module):
    """A transformer of GPT-2 small's shape, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            y = layer(y, src_mask=mask, is_causal=True)
        return nn.functional.linear(self.norm(y), self.tokens.weight)


def worker(
    rank: int, ranks: int, steps: int, compiles: bool, names: Sequence[str], results: dict[str, float]
) -> None:
    """Time the contenders, one after the other; rank 0 records milliseconds per step."""
    torch.set_num_threads(max(1, (os.cpu_count() or ranks) // ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    for name in names:
        torch.manual_seed(0)
        model = GPT().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        strategy = CONTENDERS[name]
        sync = offbeat.attach(model, optimizer, strategy, timeout_s=300) if strategy else None
        loop_model: nn.Module = DistributedDataParallel(model) if name == DDP else model
        if compiles:
            torch._dynamo.reset()
            loop_model = torch.compile(loop_model)  # type: ignore[assignment]
        times = []
        for step in range(WARM_UP + steps):
            torch.cuda.synchronize()
            if step >= WARM_UP:
                times.append(time.perf_counter())
            x = torch.randint(VOCABULARY, (BATCH, LENGTH), device="cuda")
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                logits = loop_model(x)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), x.flatten()).backward()
            optimizer.step()
        if sync is not None:
            sync.settle()
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        laps = [1e3 * (b - a) for a, b in pairwise(times)]
        if rank == 0:
            results[name] = statistics.mean(laps)
            print(f"{name}: {statistics.mean(laps):.0f} ms per step", flush=True)
        if sync is not None:
            sync.close(publish=False)
        del model, loop_model, optimizer, sync
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    parser = benchmark_parser("gpu_step", __doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args(arguments)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(
            worker,
            (options.ranks, options.steps, options.compile, options.only, results),
            nprocs=options.ranks,
        )
        figures = dict(results)
    columns = ["contender", "ms per step", "of DDP"]
    table = Table("gpu_step", __doc__.splitlines()[0], columns, "compiled" if options.compile else "")
    table.note(
        f"{options.ranks} ranks on one {torch.cuda.get_device_name()}, means of {options.steps} steps"
        + (", compiled." if options.compile else ".")
    )
    for name, milliseconds in figures.items():
        of_ddp = f"{milliseconds / figures[DDP]:.2f}" if DDP in figures else ""
        table.row(name, f"{milliseconds:.0f}", of_ddp)
    table.write()
    return 0
