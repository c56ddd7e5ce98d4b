"""How fast are the codecs?

    python -m benchmarks.codecs [--device cuda] [--numel N]

Each encodes and decodes a tensor of 10 million float32 on one core, of 100 million on a GPU (10 million
take no longer there than to start some kernels). The limit is what memory allows, as a copy of the tensor
shows just before, for the bytes that must be touched: the tensor is read and the packet written; the
packet is read and the decoded tensor written. Goals: on one core, sampled TopK at least 3 times as fast
as torch.topk, and Quantize(8) above 1 GB/s there and back; on a GPU at least half of the limit. On a GPU,
packets are also held against those of the CPU: they must decode alike on both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.tables import Table
from offbeat import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, RandomK, TopK
from offbeat.codecs import Matrix

REPEATS = 9
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


def seconds(act: Callable[[], object], device: torch.device) -> float:
    """The middle of several times, after a first one that does not count."""
    times = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(table: Table, made: Codec, x: Tensor, touched_s: float) -> tuple[float, float]:
    """A row; seconds to encode and to decode."""
    memory = made.init(x)
    packet = torch.empty(made.nbytes(x.numel(), x.dtype), dtype=torch.uint8, device=x.device)
    out, source = torch.empty_like(x), x.clone()  # with error feedback, the source is used up
    made.encode(memory, source, packet)
    source.copy_(x)
    feedback = isinstance(made, ErrorFeedback)
    there = seconds(lambda: made.encode(memory, source, packet), x.device)
    back = seconds(lambda: made.decode(packet, out), x.device)
    kept = (
        3 * x.nbytes if feedback else 0
    )  # what is kept is read and written, and what is left of x is written
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


def check_alike(made: Codec, device: torch.device) -> None:
    """A packet of one device decodes to the same on the other."""
    x = torch.randn(200_001, generator=torch.Generator().manual_seed(0))
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
    options = parser.parse_args()
    device = torch.device(options.device)
    numel = options.numel or (10_000_000 if device.type == "cpu" else 100_000_000)
    torch.set_num_threads(1)
    columns = ["codec", "packet MB", "encode ms", "limit ms", "of limit", "decode ms", "limit ms", "of limit"]
    name = "codecs" if device.type == "cpu" else f"codecs-{device.type}"
    table = Table(name, __doc__ or "", [*columns, "GB/s there and back"])
    x = torch.randn(numel, device=device)
    room = torch.empty_like(x)
    touched_s = seconds(lambda: room.copy_(x), device) / (2 * x.nbytes)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one core"
    table.note(f"{numel:,} float32 on {where}; memory: {1e-9 / touched_s:.0f} GB/s, read and written")
    if device.type == "cuda":
        for made in CODECS:
            check_alike(made, device)
        table.note("packets of the GPU and of the CPU decode alike, each on both")
    times = {str(made): measure(table, made, x, touched_s) for made in CODECS}
    if device.type == "cpu":
        faster = times["topk(0.01, sampled=false)"][0] / times["topk(0.01)"][0]
        table.note(
            f"TopK(0.01) by a sampled threshold is {faster:.1f} times as fast as by torch.topk; goal: 3"
        )
        both = sum(times["quantize(8)"])
        table.note(f"Quantize(8): {x.nbytes / both / 1e9:.2f} GB/s there and back; goal: 1")
    rows = int(numel**0.5)
    power, matrix = PowerSGD(4), Matrix(0, rows, rows)
    factors, square = power.init(x, [matrix]), x[: rows * rows].view(rows, rows)
    q = factors.q.view(rows, 4)
    p = seconds(lambda: torch.linalg.qr(square @ q).Q, device)
    table.note(
        f"PowerSGD(4) of one {rows} × {rows} matrix: {p * 1e3:.2f} ms for P and its orthonormal columns, of"
        f" which reading the matrix takes {square.nbytes * touched_s * 1e3:.2f}"
    )
    table.write()


if __name__ == "__main__":
    main()
