"""How fast are the codecs?

    python -m benchmarks.codecs [--device cuda] [--numel N] [--timeline]

Each encodes and decodes a tensor of 10 million float32 on one core, of 100 million on a GPU (10 million
take no longer there than to start some kernels). The limit is what memory allows, as a copy of the tensor
shows just before, for the bytes that must be touched: the tensor is read and the packet written; the
packet is read and the decoded tensor written. Goals: on one core, sampled TopK at least 3 times as fast
as torch.topk, and Quantize(8) above 1 GB/s there and back; on a GPU at least half of the limit. There,
time is the GPU's own, with other work before it, as in backward: to start a kernel takes the host some
0.05 ms, which nobody waits for then. `--timeline` tells of TopK's encoding kernel by kernel. Packets are also
held against those of the CPU: they must decode alike on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.tables import Table
from offbeat import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, RandomK, TopK
from offbeat.codecs import Matrix
from offbeat.codecs.base import Stream
from offbeat.core.pending import Arrived, block_on
from offbeat.core.port import Lane, Op

REPEATS = 9
BEFORE = 4  # passes over 4 GB, a few milliseconds, while the host gets ahead
CODECS = [
    TopK(0.01),
    TopK(0.01, sampled=False),
    ErrorFeedback(TopK(0.01)),
    RandomK(0.01),
    Quantize(8),
    Quantize(8, stochastic=True),
    Quantize(4),
    Quantize(1),
    Half(),
    BFloat16(),
]


def seconds(act: Callable[[], object], device: torch.device, busy: Tensor | None = None) -> float:
    """The middle of several times, after a first one that does not count. On a GPU that is `busy` with
    something before, as it is in backward, the host is ahead of it: what is left is the GPU's own time, and
    the host's where it waits for an answer."""
    times = []
    for _ in range(REPEATS + 1):
        if device.type == "cpu":
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if busy is not None:
            for _ in range(BEFORE):
                busy.neg_()
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def timeline(act: Callable[[], object], busy: Tensor) -> list[tuple[str, float, float]]:
    """What the GPU does, kernel by kernel: its name, how long the GPU had nothing to do before, and how long
    it took, in microseconds."""
    act()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(BEFORE):
            busy.neg_()
        act()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    told, free = [], 0.0
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        if "neg" not in event["name"]:
            told.append((event["name"], event["ts"] - free, event["dur"]))
        free = event["ts"] + event["dur"]
    return told


def encode_s(made: Codec, x: Tensor) -> float:
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
    memory, source = made.init(x), x.clone()
    return seconds(lambda: made.encode(memory, source, packet), x.device)


def measure(
    table: Table, made: Codec, x: Tensor, touched_s: float, busy: Tensor | None
) -> tuple[float, float]:
    """A row; seconds to encode and to decode."""
    memory = made.init(x)
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
    out, source = torch.empty_like(x), x.clone()  # with error feedback, the source is used up
    made.encode(memory, source, packet)
    source.copy_(x)
    feedback = isinstance(made, ErrorFeedback)
    there = seconds(lambda: made.encode(memory, source, packet), x.device, busy)
    back = seconds(lambda: made.decode(packet, out), x.device, busy)
    # what is kept is read and written, and what is left of x is written
    kept = 3 * x.nbytes if feedback else 0
    must = [x.nbytes + packet.nbytes + kept, packet.nbytes + x.nbytes]
    limits = [nbytes * touched_s for nbytes in must]
    table.row(
        str(made),
        f"{packet.nbytes / 1e6:.2f}",
        f"{there * 1e3:.2f}",
        f"{limits[0] * 1e3:.2f}",
        f"{limits[0] / there:.2f}",
        f"{back * 1e3:.2f}",
        f"{limits[1] * 1e3:.2f}",
        f"{limits[1] / back:.2f}",
        f"{x.nbytes / (there + back) / 1e9:.2f}",
    )
    return there, back


class Alone:
    """A port without others: what is left is what the codec itself does."""

    rank, world = 0, 1

    def reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Arrived[Tensor]:
        return Arrived(tensor)


async def there_and_back(made: Codec, wire: Stream, tensor: Tensor) -> None:
    port: Any = Alone()
    sent = made.start(wire, tensor, port)
    await made.finish(wire, tensor, port, await made.exchange(wire, tensor, port, sent))


def check_alike(made: Codec, device: torch.device) -> None:
    """A packet of one device decodes to the same on the other."""
    x = torch.randn(1_200_001, generator=torch.Generator().manual_seed(0))
    decoded = []
    for home in (torch.device("cpu"), device):
        packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=home)
        made.encode(made.init(x.to(home)), x.to(home, copy=True), packet)
        for place in (torch.device("cpu"), device):
            out = torch.empty_like(x, device=place)
            made.decode(packet.to(place), out)
            decoded.append(out.cpu())
        assert torch.equal(decoded[-1], decoded[-2]), f"{made}: a packet means one thing here, another there"
    stochastic = getattr(made, "stochastic", False)  # each device has a generator of its own
    assert stochastic or torch.allclose(decoded[0], decoded[2], rtol=1e-6), f"{made} is another on {device}"
    spoilt = x.to(device)
    spoilt[777] = torch.inf
    made.encode(made.init(spoilt), spoilt, packet)
    made.decode(packet, out)
    assert not out.isfinite().all(), f"{made} hides what is not finite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numel", type=int, help="default: 10 million, on a GPU 100 million")
    parser.add_argument("--timeline", action="store_true", help="on a GPU: TopK's kernels, and no table")
    options = parser.parse_args()
    device = torch.device(options.device)
    numel = options.numel or (10_000_000 if device.type == "cpu" else 100_000_000)
    torch.set_num_threads(1)
    columns = ["codec", "packet MB", "encode ms", "limit ms", "of limit", "decode ms", "limit ms", "of limit"]
    name = "codecs" if device.type == "cpu" else f"codecs-{device.type}"
    table = Table(name, __doc__ or "", [*columns, "GB/s there and back"])
    x = torch.randn(numel, device=device)
    room = torch.empty_like(x)
    busy = torch.zeros(1 << 30, device=device) if device.type == "cuda" else None
    touched_s = seconds(lambda: room.copy_(x), device, busy) / (2 * x.nbytes)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one core"
    if busy is not None and options.timeline:
        made = TopK(0.01)
        packet = torch.empty(made.nbytes(numel, x.dtype), dtype=torch.uint8, device=device)
        for name, gap, took in timeline(lambda: made.encode(None, x, packet), busy):
            print(f"{gap:8.1f} us nothing, {took:8.1f} us {name[:80]}")
        return
    table.note(f"{numel:,} float32 on {where}; memory: {1e-9 / touched_s:.0f} GB/s, read and written")
    if device.type == "cuda":
        for made in CODECS:
            check_alike(made, device)
        table.note("packets of the GPU and of the CPU decode alike, each on both")
        called = {str(made): encode_s(made, x) for made in CODECS}
        told = ", ".join(f"{name} {spent * 1e3:.2f}" for name, spent in called.items())
        table.note(f"encode ms on a GPU that has nothing else to do, and waits for the host: {told}")
        unlucky = encode_s(TopK(0.01), torch.zeros_like(x))
        table.note(f"topk(0.01) of zeros, where no threshold by sample is a good one: {unlucky * 1e3:.2f} ms")
    times = {str(made): measure(table, made, x, touched_s, busy) for made in CODECS}
    if device.type == "cpu":
        faster = times["topk(0.01, sampled=false)"][0] / times["topk(0.01)"][0]
        table.note(
            f"TopK(0.01) by a sampled threshold is {faster:.1f} times as fast as by torch.topk; goal: 3"
        )
        both = sum(times["quantize(8)"])
        table.note(f"Quantize(8): {x.nbytes / both / 1e9:.2f} GB/s there and back; goal: 1")
    rows = int(numel**0.5)
    power, square = PowerSGD(4), x[: rows * rows]
    wire = power.wire(square, [Matrix(0, rows, rows)])
    both = seconds(lambda: block_on(there_and_back(power, wire, square)), device, busy)
    limit = 3 * square.nbytes * touched_s
    table.note(
        f"PowerSGD(4) of one {rows} × {rows} matrix, there and back: {both * 1e3:.2f} ms, {limit / both:.2f}"
        f" of the limit of {limit * 1e3:.2f} ms: the matrix is read for P, read for Q, and written"
    )
    table.write()


if __name__ == "__main__":
    main()
