"""SelSync: selective synchronization (Tyagi & Swany, CLUSTER 2023): average only while gradients change.

    each step t:   s_t = ‖g_t‖²,  the squared norm of this worker's whole gradient
                   E_t = Σ_k (1−a)^k s_{t−k} / Σ_k (1−a)^k,   k = 0 … W−1         (W: window, a: smoothing)
                   Δ_t = |E_t − E_{t−1}| / E_{t−1}
                   w_i ← the optimizer's step with g_i                             (locally, first, always)
                   if any worker has Δ_t ≥ δ:  w_i ← (1/N) Σ w_j                   (parameter aggregation, PA)

The first W steps, until the window is full, always synchronize. The workers learn whether any of them has
Δ ≥ δ from one reduction of 4 bytes. It is a barrier at each step: SelSync saves bytes, and does not cure
stragglers. With δ = 0 it averages at every step, with δ = ∞ never after the window: then nobody asks.

With `period` = n the workers ask each other in the steps W + n, W + 2n, … only. Δ is tracked in every step:

    in a step t that asks:   if any worker had Δ ≥ δ in any of the steps t−n+1 … t:   w_i ← (1/N) Σ w_j
    in one that does not:    nothing travels, and nobody waits

So no change is lost; it is answered up to n − 1 steps late. With δ = 0 that is the window, then LocalSGD.

From the paper: the rule, W = 25, a = N/100, and `aggregate="gradients"` (GA), which averages gradients
instead of weights on synchronized steps, before the optimizer steps; replicas then never coincide again.
Where its authors' code differs from the paper, this follows the paper: the norm is of the whole gradient, and
smoothed once.

Ours: what the paper leaves open, `late` and `period`.
- The norm is taken just before the optimizer steps, so after unscaling (GradScaler) and clipping.
- The window enters twice: as the warm-up, and in E, where gradients older than W steps count for nothing.
- Where E_{t−1} is 0, Δ is ∞: synchronize. Where the gradient is not finite, or a GradScaler skipped the
  optimizer, Δ is ∞ too, and s_t is left out of E. Under GA such a worker adds zeros to the mean.
- `late=True` acts on the flags of the step before, so that their reduction hides behind the next forward
  and backward. What the window says is known without asking, and is not late.
- `period` as above; 1 is the paper's. Under GA what is averaged are the gradients of the step that asks (with
  `late`, of the one after it), whichever step changed; those of the others have been stepped with already.
  What is not finite in a step that does not ask is that worker's own, as in any local step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Layout
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Op, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError

AGGREGATES = ("parameters", "gradients")


@dataclass
class SelSyncState:
    """What a worker remembers of its gradients."""

    step: int = 0
    squares: list[float] = field(default_factory=list)  # s of the last steps, a window at most, newest last
    smoothed: float = 0.0  # E of the last step
    changed: bool = False  # Δ ≥ δ in a step since the workers last asked each other
    flag: Pending[Tensor] | None = None  # late: of the last step, on its way


@dataclass(frozen=True, kw_only=True)
class SelSync(Strategy[SelSyncState]):
    """Average weights in steps in which some worker's gradient changes by `delta` or more."""

    name = "selsync"
    no_codec = (
        "it sends seldom, and then weights must become equal; errors kept for later would be of old ones"
    )
    summary = "step locally, average weights when some worker's gradient norm changes by `delta` or more"

    delta: float = 0.3
    aggregate: str = "parameters"
    window: int = 25
    smoothing: float | None = None
    late: bool = False
    period: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.delta, int | float) or not self.delta >= 0:
            raise SettingError(f"delta={self.delta!r}: a number, 0 or more; inf: never after the window")
        if self.aggregate not in AGGREGATES:
            raise SettingError(f"aggregate={self.aggregate!r}: choose one of {', '.join(AGGREGATES)}")
        if not isinstance(self.window, int) or self.window < 2:
            raise SettingError(f"window={self.window!r}: a whole number of steps, at least 2")
        smooth_enough = self.smoothing is None or (
            isinstance(self.smoothing, int | float) and 0 < self.smoothing <= 1
        )
        if not smooth_enough:
            raise SettingError(f"smoothing={self.smoothing!r}: above 0, at most 1; None: workers/100")
        if not isinstance(self.period, int) or self.period < 1:
            raise SettingError(f"period={self.period!r}: a whole number of steps, at least 1")

    def init(self, replica: Replica) -> SelSyncState:
        return SelSyncState()

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(model, gradients=self.aggregate == "gradients")

    async def step(self, state: SelSyncState, replica: Replica, port: Port) -> None:
        stepping = await replica.about_to_update()
        square = squared_norm(replica) if stepping else math.inf  # skipped: not this step's gradient any more
        state.changed |= self.change(state, square, port.world) >= self.delta
        known = self._known(state.step)
        flag = None
        if known is None:
            flag = port.all_reduce(replica.weights[0].new_full((1,), state.changed).float(), Op.MAX)
        if known is not False:  # this step answers for all up to it
            state.changed = False
        if self.late:
            flag, state.flag = state.flag, flag
        if self.aggregate == "gradients":
            if known or await _raised(flag):
                await average_gradients(replica, port, stepping, math.isfinite(square))
            await replica.update()
        else:
            await replica.update()  # meanwhile the flag travels
            if known or await _raised(flag):
                await replica.average(port)

    async def drain(self, state: SelSyncState, replica: Replica, port: Port) -> None:
        if state.flag is not None:  # to be acted on in the next step all the same
            state.flag = Arrived(await state.flag)

    def change(self, state: SelSyncState, square: float, world: int) -> float:
        """Δ of the next step, whose squared gradient norm is `square`."""
        state.step += 1
        if not math.isfinite(square):
            return math.inf
        before = state.smoothed
        state.squares = [*state.squares, square][-self.window :]
        state.smoothed = smooth(state.squares, self.smoothing or min(1.0, world / 100))
        return abs(state.smoothed - before) / before if before else math.inf

    def _known(self, step: int) -> bool | None:
        """Whether this step synchronizes, where all workers know without asking each other."""
        if step <= self.window:
            return True
        if self.delta == math.inf or (step - self.window) % self.period:
            return False
        return True if self.delta == 0 else None


def smooth(values: Sequence[float], smoothing: float) -> float:
    """The mean, where each value counts 1 − smoothing times as much as the one after it."""
    total = weight = 0.0
    for value in values:
        total = total * (1 - smoothing) + value
        weight = weight * (1 - smoothing) + 1
    return total / weight


def squared_norm(replica: Replica) -> float:
    """Of all gradients of this worker, in one pass; a GPU is read once."""
    grads = [p.grad for block in replica.blocks for p in block.params if p.grad is not None]
    if not grads:
        return 0.0
    norms = torch._foreach_norm([g.coalesce().values() if g.is_sparse else g for g in grads])
    home = norms[0].device
    return math.fsum(norm * norm for norm in torch.stack([norm.to(home) for norm in norms]).tolist())


async def average_gradients(replica: Replica, port: Port, stepping: bool, finite: bool) -> None:
    """Replace gradients by their mean over all workers; one that is not finite counts as zero.

    A worker whose optimizer was skipped must not touch its gradients: they are the next step's.
    """
    flying = []
    for block in replica.blocks:
        mine = block.marked if stepping else torch.zeros_like(block.marked)
        flying.append(port.all_reduce(mine if finite else mine.zero_()))
    replica.buffers.start(port)
    for block, pending in zip(replica.blocks, flying, strict=True):
        await pending
        if stepping:
            block.hand_out()
    await replica.buffers.finish()


async def _raised(flag: Pending[Tensor] | None) -> bool:
    return flag is not None and (await flag).item() > 0
