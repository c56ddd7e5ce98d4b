"""Rate of the slowest link between the ranks: a quick look at what all-reduces of two sizes take.

`offbeat calibrate` measures links with care; this is for decisions in which a factor of two counts.
"""

from __future__ import annotations

import math
import time

import torch

from offbeat.core.port import Op
from offbeat.worlds.processes.port import ProcessPort

SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 18
REPEATS = 3


def measure_link_rate(port: ProcessPort, device: torch.device) -> float:
    """Return the bytes per second that each rank sends in a ring, as this rank sees it; all ranks call this.

    Infinite where nothing is in the way: no other rank, or as long with 64 times the bytes.
    """
    if port.world == 1:
        return math.inf
    _seconds(port, device, SMALL_BYTES)  # connects, and waits for the others
    small_s, large_s = (
        min(_seconds(port, device, nbytes) for _ in range(REPEATS)) for nbytes in (SMALL_BYTES, LARGE_BYTES)
    )
    on_wire = 2 * (port.world - 1) / port.world * (LARGE_BYTES - SMALL_BYTES)
    return on_wire / (large_s - small_s) if large_s > small_s else math.inf


def _seconds(port: ProcessPort, device: torch.device, nbytes: int) -> float:
    tensor = torch.zeros(nbytes // 4, device=device)
    tensor[0].item()  # a GPU has made it
    began = time.perf_counter()
    pending = port.all_reduce(tensor, Op.SUM)
    pending.wait()
    pending.result()
    tensor[0].item()
    return time.perf_counter() - began
