"""Rate of the slowest link between the ranks: a quick look at what all-reduces of two sizes take.

`offbeat calibrate` measures links with care; this is for decisions in which a factor of two counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from offbeat.core.port import CollectivePort, Op

MOST_BYTES = 1 << 20
SMALLER = 4  # times: both sizes are larger than what passes an idle link at once
REPEATS = 3


def measure_link_rate(
    port: CollectivePort, device: torch.device, nbytes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the bytes per second that each rank sends in a ring, as this rank sees it; all ranks call this.

    It sends up to a mebibyte, and no more than `nbytes`, at a time. Infinite where nothing is in the way: no
    other rank, or as long with more bytes. It is not training: the ledger does not count it.
    """
    if port.world == 1:
        return math.inf

    def least_s(nbytes: int) -> float:
        return min(_seconds(port, torch.zeros(nbytes // 4, device=device), clock) for _ in range(REPEATS))

    large = min(nbytes, MOST_BYTES)
    small = large // SMALLER
    with port.ledger.paused():
        _seconds(port, torch.zeros(1, device=device), clock)  # connects, and waits for the others
        small_s, large_s = least_s(small), least_s(large)
    on_wire = 2 * (port.world - 1) / port.world * (large - small)
    return on_wire / (large_s - small_s) if large_s > small_s else math.inf


def _seconds(port: CollectivePort, tensor: torch.Tensor, clock: Callable[[], float]) -> float:
    tensor[0].item()  # a GPU has made it
    began = clock()
    pending = port.all_reduce(tensor, Op.SUM)
    pending.wait()
    pending.result()
    tensor[0].item()
    return clock() - began
