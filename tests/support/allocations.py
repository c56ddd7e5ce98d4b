"""Memory that steps of a strategy allocate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.overhead.memory import live_bytes
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.profiler import ProfilerActivity, profile

from offbeat.core.conductor import Conductor
from offbeat.core.pending import block_on


@contextmanager
def recording_allocations() -> Iterator[list[int]]:
    """Yield a list that holds, after the block, the bytes of every allocation that torch made in it.

    Of this thread, and of what it called in the background. The profiler's own summary is not asked for: it
    reads a good deal more of each event, and has failed at it.
    """
    sizes: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield sizes
    assert seen.profiler is not None
    sizes += [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == MEMORY_EVENT_NAME]


def largest_allocation(steps: int, conductor: Conductor[Any], optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the largest allocation that these steps make."""
    with recording_allocations() as sizes:
        for _ in range(steps):
            block_on(conductor.begin())
            block_on(conductor.about_to_update())
            optimizer.step()
            block_on(conductor.update())
    return max(sizes, default=0)


@contextmanager
def counting_live_tensors() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes of the tensors made in this context that are still alive.

    Memory that several tensors share counts once. Older objects are left out, so counting is fast; and they
    stay so: to search all that was imported again would cost this process's later tests 60 ms each time.
    """
    gc.collect()
    gc.freeze()
    yield live_bytes
