"""Learning rates over a run, as factors on the task's rate.

constant   1
cosine     rises linearly over the first twentieth of the steps, then falls as half a cosine to 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

SCHEDULES = ("constant", "cosine")
RISING = 0.05  # fraction of a run


def rate_factor(schedule: str, step: int, total: int) -> float:
    """Return the factor of the learning rate in a step; `step` counts from 1 to `total`."""
    if schedule == "constant":
        return 1.0
    rising = RISING * total
    if step <= rising:
        return step / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / (total - rising + 1)))


def set_rates(optimizers: Sequence[Optimizer], schedule: str, step: int, total: int) -> None:
    """Set the learning rates of a step. The rates that an optimizer was made with are kept in its groups.

    There torch's own schedulers keep them, too: so a worker that joins later gets them with the state.
    """
    if schedule == "constant":
        return
    factor = rate_factor(schedule, step, total)
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
