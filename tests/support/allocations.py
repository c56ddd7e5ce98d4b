"""Memory that steps of a strategy allocate."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from offbeat.core.conductor import Conductor
from offbeat.core.pending import block_on


def largest_allocation(steps: int, conductor: Conductor[Any], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the largest tensor that these steps make."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(steps):
            block_on(conductor.begin())
            block_on(conductor.about_to_update())
            optimizer.step()
            block_on(conductor.update())
    return max(event.self_cpu_memory_usage for event in seen.events())
