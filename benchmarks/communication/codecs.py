"""How fast do codecs encode and decode?

    python -m benchmarks run codecs [--device cuda] [--numel N] [--timeline]

Each codec encodes and decodes a tensor of 10 million float32 on one core, or of 100 million on a GPU (where
10 million take no longer than the launch of some kernels). The limit is the memory bandwidth, measured by a
copy of the tensor just before, for the bytes that must be touched: encoding reads the tensor and writes the
packet, decoding reads the packet and writes the tensor.

Goals: on one core, sampled TopK at least 3x as fast as torch.topk, and Quantize(8) above 1 GB/s for encoding
and decoding; on a GPU at least half of the limit. GPU times are the GPU's own, measured behind other work, as
in backward: a kernel launch takes the host about 0.05 ms, which then delays nothing. `--timeline` lists the
kernels of TopK's encoding. On a GPU, packets are also compared with those of the CPU: both must decode them
to the same tensor.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from offbeat import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, RandomK, TopK
from offbeat.codecs.base import Stream
from offbeat.core.blocks import Matrix
from offbeat.core.pending import Arrived, block_on
from offbeat.core.port import Lane, Op

REPEATS = 9
BUSY_PASSES = 4  # over 4 GB: a few milliseconds of GPU work, in which the host gets ahead
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


def median_s(act: Callable[[], object], device: torch.device, busy: Tensor | None = None) -> float:
    """Return the median time of `act` in seconds, after one call that does not count.

    With `busy`, the GPU first works on that tensor, as it works on backward in training. The host is then
    ahead, and the time is the GPU's own, plus the host's where it waits for a result.
    """
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
            for _ in range(BUSY_PASSES):
                busy.neg_()
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def timeline(act: Callable[[], object], busy: Tensor) -> list[tuple[str, float, float]]:
    """List the kernels that `act` runs: the name, the GPU's idle time before it, and its time, in µs."""
    act()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(BUSY_PASSES):
            busy.neg_()
        act()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels, free = [], 0.0
    for event in sorted(on_gpu, key=lambda event: event["ts"]):
        if "neg" not in event["name"]:
            kernels.append((event["name"], event["ts"] - free, event["dur"]))
        free = event["ts"] + event["dur"]
    return kernels


def encode_s(codec: Codec, x: Tensor) -> float:
    """Return the seconds to encode on an idle device."""
    packet = torch.empty(codec.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
    memory, source = codec.init(x), x.clone()
    return median_s(lambda: codec.encode(memory, source, packet), x.device)


def measure(
    table: Table, codec: Codec, x: Tensor, second_per_byte: float, busy: Tensor | None
) -> tuple[float, float]:
    """Add a row for one codec; return its seconds to encode and to decode."""
    memory = codec.init(x)
    packet = torch.empty(codec.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
    out, source = torch.empty_like(x), x.clone()  # error feedback overwrites the source
    codec.encode(memory, source, packet)
    source.copy_(x)
    feedback = isinstance(codec, ErrorFeedback)
    encode = median_s(lambda: codec.encode(memory, source, packet), x.device, busy)
    decode = median_s(lambda: codec.decode(packet, out), x.device, busy)
    # the residual is read and written, and the rest of x is written
    extra = 3 * x.nbytes if feedback else 0
    touched = [x.nbytes + packet.nbytes + extra, packet.nbytes + x.nbytes]
    limits = [nbytes * second_per_byte for nbytes in touched]
    table.row(
        str(codec),
        f"{packet.nbytes / 1e6:.2f}",
        f"{encode * 1e3:.2f}",
        f"{limits[0] * 1e3:.2f}",
        f"{limits[0] / encode:.2f}",
        f"{decode * 1e3:.2f}",
        f"{limits[1] * 1e3:.2f}",
        f"{limits[1] / decode:.2f}",
        f"{x.nbytes / (encode + decode) / 1e9:.2f}",
    )
    return encode, decode


class SinglePort:
    """Port of a single worker: an exchange costs nothing but the codec's own work."""

    rank, world = 0, 1

    def reduce(self, tensor: Tensor, op: Op = Op.MEAN, lane: Lane = Lane.FRONT) -> Arrived[Tensor]:
        return Arrived(tensor)


async def round_trip(codec: Codec, stream: Stream, tensor: Tensor) -> None:
    """Encode a tensor, exchange it within a group of one, and decode it."""
    port: Any = SinglePort()
    sent = codec.start(stream, tensor, port)
    await codec.finish(stream, tensor, port, await codec.exchange(stream, tensor, port, sent))


def check_devices_agree(codec: Codec, device: torch.device) -> None:
    """Check that CPU and GPU encode alike, and decode each other's packets to the same tensor."""
    x = torch.randn(1_200_001, generator=torch.Generator().manual_seed(0))
    decoded = []
    for source_device in (torch.device("cpu"), device):
        packet = torch.empty(codec.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=source_device)
        codec.encode(codec.init(x.to(source_device)), x.to(source_device, copy=True), packet)
        for target_device in (torch.device("cpu"), device):
            out = torch.empty_like(x, device=target_device)
            codec.decode(packet.to(target_device), out)
            decoded.append(out.cpu())
        assert torch.equal(decoded[-1], decoded[-2]), f"{codec}: a packet decodes differently on {device}"
    stochastic = getattr(codec, "stochastic", False)  # each device has a generator of its own
    assert stochastic or torch.allclose(decoded[0], decoded[2], rtol=1e-6), f"{codec} differs on {device}"
    infinite = x.to(device)
    infinite[777] = torch.inf
    codec.encode(codec.init(infinite), infinite, packet)
    codec.decode(packet, out)
    assert not out.isfinite().all(), f"{codec} hides infinite values"


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("codecs", __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numel", type=int, help="entries of the tensor (default: 10 million, on a GPU 100)")
    parser.add_argument("--timeline", action="store_true", help="on a GPU: list TopK's kernels, no table")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    numel = options.numel or (10_000_000 if device.type == "cpu" else 100_000_000)
    torch.set_num_threads(1)
    columns = [
        "codec",
        "packet MB",
        "encode ms",
        "limit ms",
        "limit / encode",
        "decode ms",
        "limit ms",
        "limit / decode",
    ]
    variant = "" if device.type == "cpu" else device.type
    table = Table("codecs", __doc__ or "", [*columns, "GB/s encode + decode"], variant)
    x = torch.randn(numel, device=device)
    other = torch.empty_like(x)
    busy = torch.zeros(1 << 30, device=device) if device.type == "cuda" else None
    second_per_byte = median_s(lambda: other.copy_(x), device, busy) / (2 * x.nbytes)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one core"
    if busy is not None and options.timeline:
        codec = TopK(0.01)
        packet = torch.empty(codec.nbytes(numel, x.dtype), dtype=torch.uint8, device=device)
        for name, gap, took in timeline(lambda: codec.encode(None, x, packet), busy):
            print(f"{gap:8.1f} us idle, {took:8.1f} us {name[:80]}")
        return
    table.note(f"{numel:,} float32 on {where}; memory: {1e-9 / second_per_byte:.0f} GB/s, read and written")
    if device.type == "cuda":
        for codec in CODECS:
            check_devices_agree(codec, device)
        table.note("CPU and GPU decode each other's packets to the same tensor")
        idle = ", ".join(f"{codec} {encode_s(codec, x) * 1e3:.2f}" for codec in CODECS)
        table.note(f"encode ms on an idle GPU, which waits for the host: {idle}")
        zeros_s = encode_s(TopK(0.01), torch.zeros_like(x))
        table.note(f"topk(0.01) of zeros, where no sampled threshold is a good one: {zeros_s * 1e3:.2f} ms")
    times = {str(codec): measure(table, codec, x, second_per_byte, busy) for codec in CODECS}
    if device.type == "cpu":
        faster = times["topk(0.01, sampled=false)"][0] / times["topk(0.01)"][0]
        table.note(
            f"TopK(0.01) with a sampled threshold is {faster:.1f}x as fast as with torch.topk; goal: 3"
        )
        both = sum(times["quantize(8)"])
        table.note(f"Quantize(8): {x.nbytes / both / 1e9:.2f} GB/s for encoding and decoding; goal: 1")
    rows = int(numel**0.5)
    power, square = PowerSGD(4), x[: rows * rows]
    stream = power.stream(square, [Matrix(0, rows, rows)])
    both = median_s(lambda: block_on(round_trip(power, stream, square)), device, busy)
    limit = 3 * square.nbytes * second_per_byte
    table.note(
        f"PowerSGD(4) of one {rows} × {rows} matrix, round trip: {both * 1e3:.2f} ms, {limit / both:.2f}"
        f" of the limit of {limit * 1e3:.2f} ms: the matrix is read for P, read for Q, and written"
    )
    table.write()
