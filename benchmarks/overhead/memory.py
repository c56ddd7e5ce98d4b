"""How many copies of the model does each strategy hold beyond the bare loop?

    python -m benchmarks run memory [--model gpt] [--workers 4] [--device cuda]

Local workers train a model of GPT-2's shape with AdamW, first in the bare loop, then under each strategy, for
a few steps. Compared is the most memory that tensors hold after a backward or a step: on the CPU all live
tensors of a worker, on a GPU what torch's allocator has handed out at most. Of a server, the resident memory
of the process that holds a shard is compared with that of a shard of a tiny model.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from offbeat.worlds.processes.launcher import launch

SHAPES = {  # width, layers, vocabulary
    "tiny": (32, 1, 64),
    "small": (384, 6, 24_000),  # 20 million parameters
    "gpt": (768, 12, 50_257),  # 124 million parameters: GPT-2 small
}
WARMUP, STEPS, TOKENS = 4, 12, 16
STRATEGIES: dict[str, Any] = {
    "BSP()": offbeat.BSP(),
    "LocalSGD(period=4)": offbeat.LocalSGD(period=4),
    "SelSync()": offbeat.SelSync(),
    "DiLoCo(period=4)": offbeat.DiLoCo(period=4),
    "DiLoCo(period=4, offload='cpu')": offbeat.DiLoCo(period=4, offload="cpu"),
    "DiLoCo(period=4, delay=2)": offbeat.DiLoCo(period=4, delay=2),
    "DiLoCo(period=4, fragments=2, delay=1)": offbeat.DiLoCo(period=4, fragments=2, delay=1),
    "DiLoCo(period=4, codec=Half())": offbeat.DiLoCo(period=4, codec=offbeat.Half()),
    "OSP(growth=4)": offbeat.OSP(growth=4),
    "SSDSGD(warmup=4)": offbeat.SSDSGD(warmup=WARMUP),
    "SSDSGD(warmup=4, on='server')": offbeat.SSDSGD(warmup=WARMUP, on="server"),
    "SSP()": offbeat.SSP(),
    "GSSP()": offbeat.GSSP(),
    "Oscars()": offbeat.Oscars(),
}


class Block(nn.Module):
    """A transformer block, as GPT-2 has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """A language model of GPT-2's shape, with one matrix for tokens in and out."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.norm(self.blocks(self.tokens(x) + self.positions(places)))
        return nn.functional.linear(hidden, self.tokens.weight)


def live_bytes() -> int:
    """Return the bytes of all live tensors that are not frozen; memory shared by several counts once."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in found]
    total = end = 0
    for start, nbytes in sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages}):
        total += max(0, start + nbytes - max(start, end))  # one storage may lie within another
        end = max(end, start + nbytes)
    return total


def measure(strategy: Any, shape: str, device: str) -> tuple[float, float, float]:
    """Train; return the most bytes held, the bytes of the model, and the resident bytes of a shard."""
    gc.collect()
    gc.freeze()  # older objects are not counted
    torch.manual_seed(0)
    model = Transformer(*SHAPES[shape]).to(device)
    nbytes = sum(param.nbytes for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sync = offbeat.attach(model, optimizer, strategy, timeout_s=300) if strategy else None
    held, batch = [], torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    count: Callable[[], int] = torch.cuda.max_memory_allocated if device == "cuda" else live_bytes
    for step in range(STEPS):
        if device == "cuda" and step == WARMUP + 2:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        held.append(count())
        optimizer.step()
        held.append(count())
    resident = 0.0
    if sync is not None:
        resident = _resident_bytes(sync)
        sync.close()
    del model, optimizer, sync
    gc.unfreeze()
    return max(held[2 * (WARMUP + 2) :]), nbytes, resident


def _resident_bytes(sync: offbeat.Sync) -> float:
    """Return the resident memory of the shard process that this rank started; 0 if there is none."""
    client = sync.port.client
    pid = client.transport.server_pid if client is not None else None
    if pid is None:
        return 0.0
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def work(shape: str, device: str, path: str) -> None:
    """Measure every strategy as one of the workers; rank 0 writes the numbers of all of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bare, nbytes, _ = measure(None, shape, device)
    idle = measure(offbeat.SSP(), "tiny", device)[2]
    rows = {}
    for name, strategy in STRATEGIES.items():
        held, _, resident = measure(strategy, shape, device)
        own = torch.tensor([(held - bare) / nbytes, (resident - idle) / nbytes if resident else 0.0])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        rows[name] = own.tolist()
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps([nbytes, bare, rows]))
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("memory", __doc__)
    parser.add_argument("--model", choices=[name for name in SHAPES if name != "tiny"], default="small")
    parser.add_argument("--workers", type=int, choices=[2, 4], default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)
    parts = {
        "gpt": options.model == "gpt",
        "four-workers": options.workers == 4,
        "cuda": options.device == "cuda",
    }
    variant = "-".join(name for name, given in parts.items() if given)
    table = Table("memory", __doc__ or "", ["strategy", "copies", "shard process, copies"], variant)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        launch(options.workers, work, options.model, options.device, str(path))
        nbytes, bare, rows = json.loads(path.read_text())
    table.note(f"{options.workers} workers, a model of {nbytes / 4e6:.1f} million parameters, AdamW")
    table.note(f"the bare loop holds {bare / nbytes:.2f} copies: weights, gradients and two of the optimizer")
    for name, (copies, shard) in rows.items():
        table.row(f"`{name}`", f"{copies:.2f}", f"{shard:.1f}" if shard else "–")
    table.write()
