"""Eager updates of DiLoCo: a worker's own part of the outer gradient counts at once, others' a period later.

    every step:      w_i ← the optimizer's step with g_i
    every H steps:   Δ_i ← s_i − w_i                      the change since this worker's last start s_i
                     Δ̄′ arrives, the mean of the Δ_j that were sent H steps ago
                     s_i ← the outer optimizer's step on s_i with  Δ_i/N + (Δ̄′ − Δ_i′/N)
                     w_i ← s_i;   Δ_i is sent, and travels behind the next H steps

So an exchange has a whole period to hide behind, and no worker's own work waits for it. Nesterov momentum is
linear in the outer gradients. So each s_i is the one w_global of all workers, stepped with the means alone,
and a part of the worker's own:

    v ← μ v + Δ̄′;        w_global ← w_global − η (Δ̄′ + μ v)        the same on all workers: owners step it
    u_i ← μ u_i + Δ_i/N;   s_i ← w_global − η (Δ_i/N + μ u_i)

w_global is published. It lacks the Δ_j that are in flight: a period is missing at the end of training.

The idea's (arXiv 2502.12996, read in its abstract): one's own outer gradient now, those of the others when
they come. Ours: the second form, in which nothing that is rounded can drift apart, and everything else.

- A single worker has no others: by both forms it is DiLoCo, and so it is here, bit for bit.
- With a codec the mean of the decoded packets stands for Δ̄′; Δ_i/N is the worker's own, as it is.
- Batch norm's statistics come with Δ̄′, so they are a period old, too.
- s_i and u_i are two copies of the model, and what travels is a third.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class OwnPart:
    """A worker's own part, s_i and u_i. Lists have one tensor per dtype and device."""

    start: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)  # empty without momentum

    def allocate(self, weights: list[Tensor], momentum: bool) -> None:
        """Start from the weights that all workers have."""
        self.start = [weight.clone() for weight in weights]
        self.velocity = [torch.zeros_like(weight) for weight in weights] if momentum else []

    def restart(
        self, kind: int, weight: Tensor, w_global: Tensor, fraction: float, lr: float, momentum: float
    ) -> None:
        """Move `weight` to the next start; replace `w_global` by −Δ_i, the change that is to be sent.

        Nothing is allocated. `fraction` is 1/N.
        """
        start = self.start[kind]
        weight.sub_(start)
        start.copy_(w_global)
        w_global.copy_(weight)
        weight.mul_(fraction)
        start.add_(weight, alpha=lr)
        if self.velocity:
            velocity = self.velocity[kind]
            torch.add(weight, velocity, alpha=momentum, out=velocity)
            start.add_(velocity, alpha=lr * momentum)
        weight.copy_(start)

    def forget_velocity(self) -> None:
        """Clear u_i of a state that was copied: it is another worker's."""
        for velocity in self.velocity:
            velocity.zero_()
