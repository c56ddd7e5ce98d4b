"""SelSync: selective synchronization (Tyagi & Swany, CLUSTER 2023): average only while gradients change.

    each step t:   s_t = ‖g_t‖²,  the squared norm of this worker's whole gradient
                   E_t = Σ_k (1−a)^k s_{t−k} / Σ_k (1−a)^k,   k = 0 … W−1         (W: window, a: smoothing)
                   Δ_t = |E_t − E_{t−1}| / E_{t−1}
                   w_i ← the optimizer's step with g_i                             (locally, first, always)
                   if any worker has Δ_t ≥ δ:  w_i ← (1/N) Σ w_j                   (parameter aggregation, PA)

The first W steps, until the window is full, always synchronize. The workers learn whether any of them has
Δ ≥ δ from an all-reduce of 4 bytes. It is a barrier at each step: SelSync saves bytes, and does not help with
stragglers. With δ = 0 it averages at every step, with δ = ∞ never after the window: then no flag travels.

With `period` = n the workers exchange flags in the steps W + n, W + 2n, … only. Δ is tracked in every step:

    in a step t with flags:   if any worker had Δ ≥ δ in any of the steps t−n+1 … t:   w_i ← (1/N) Σ w_j
    in a step without:        nothing travels, and no worker waits

So no change is lost; the workers react to it up to n − 1 steps late. With δ = 0, SelSync is the window, then
LocalSGD.

From the paper: the rule, W = 25, a = N/100, and `aggregate="gradients"` (GA), which averages gradients
instead of weights on synchronized steps, before the optimizer steps; replicas then never coincide again.
Their mean, which `consensus()` shows, is then a model that no worker trained, and may be far worse than each
of them. So the built-in loop evaluates a replica, too (`replica_value`).

Where the authors' code differs from the paper, this file follows the paper: the norm is of the whole
gradient, and smoothed once.

Ours: `late`, `period`, and what the paper leaves open.
- The norm is of the gradient that backward left, before the loop clips it: clipped to a norm that it always
  exceeds, a gradient would never change, and no worker would synchronize again. Under a GradScaler it is
  multiplied by the scale; a new scale counts as a change.
- The window enters twice: as the warm-up, and in E, where gradients older than W steps count for nothing.
- Where E_{t−1} is 0, Δ is ∞: synchronize. Where the gradient is not finite, or a GradScaler skipped the
  optimizer, Δ is ∞ too, and s_t is left out of E. Under GA such a worker adds zeros to the mean.
- `late=True` acts on the flags of the step before, so that their all-reduce hides behind the next forward
  and backward. Steps of the window need no flag, and are not late.
- Rank 0 tells if fewer than 2% of 500 decisions were to synchronize: δ is too large for this model and N.
- `period` as above; 1 is the paper's. GA averages the gradients of the step with flags (with `late`, of the
  one after it), whichever step changed; those of the other steps have been applied already. A gradient that
  is not finite in a step without flags concerns that worker alone, as in any local step.

Under elastic, a flag is raised if any worker that is left raised it, averages are over those who are left,
and a = N/100 follows the roster. A lost worker's local steps since the last average, and its norms, are lost
with it. A newcomer starts with another worker's weights, norms and clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from offbeat.core.blocks import Layout
from offbeat.core.fields import Choice, Flag, Number, Whole
from offbeat.core.members import part_of
from offbeat.core.pending import Arrived, Pending
from offbeat.core.port import Notice, Op, Port
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy

AGGREGATES = ("parameters", "gradients")
WATCHED_STEPS, SELDOM = 500, 0.02  # fewer decisions than this fraction to synchronize are told
log = logging.getLogger("offbeat")


@dataclass
class DecisionCount:
    """The decisions of the last steps: how many, how many to synchronize, and this worker's largest Δ."""

    steps: int = 0
    synced: int = 0
    largest: float = 0.0

    def add(self, synced: bool, change: float) -> None:
        self.steps += 1
        self.synced += synced
        if math.isfinite(change):
            self.largest = max(self.largest, change)


@dataclass
class SelSyncState:
    """A worker's memory of its gradient norms, and the flag in flight."""

    step: int = 0
    squares: list[float] = field(default_factory=list)  # s of the last steps, at most a window, newest last
    smoothed: float = 0.0  # E of the last step
    changed: bool = False  # Δ ≥ δ in a step since the last exchange of flags
    flag: Pending[Tensor] | None = None  # with `late`: of the last step, in flight
    count: DecisionCount | None = field(
        default_factory=DecisionCount, metadata={"saved": False}
    )  # None: told


@dataclass(frozen=True, kw_only=True)
class SelSync(Strategy[SelSyncState]):
    """Strategy that averages weights in steps in which some worker's gradient changes by `delta` or more."""

    name = "selsync"
    summary = "step locally, average weights when some worker's gradient norm changes by `delta` or more"
    refused: ClassVar[Mapping[str, str]] = {
        "codec": "it synchronizes seldom, and weights must become equal then;"
        " an error sent later would belong to old weights"
    }

    delta: Annotated[
        float,
        Number(
            "relative change of the gradient norm at which workers synchronize",
            wording="a number, 0 or more; inf: never after the window",
            at_least=0,
            infinite=True,
        ),
    ] = 0.3
    aggregate: Annotated[str, Choice("what is averaged when workers synchronize", of=AGGREGATES)] = (
        "parameters"
    )
    window: Annotated[
        int,
        Whole("steps that the smoothed norm covers; until then, all synchronize", of="steps", at_least=2),
    ] = 25
    smoothing: Annotated[
        float | None, Number("weight of the newest norm; None: workers/100", above=0, at_most=1)
    ] = None
    late: Annotated[bool, Flag("act on the previous step's decision, so that its exchange is hidden")] = False
    period: Annotated[int, Whole("steps from one decision to the next", of="steps", at_least=1)] = 1

    def init(self, replica: Replica) -> SelSyncState:
        return SelSyncState()

    def layout(self, model: nn.Module) -> Layout:
        return Layout.default(model, gradients=self.aggregate == "gradients")

    async def step(self, state: SelSyncState, replica: Replica, port: Port) -> None:
        norm = BackwardNorm(replica)
        stepping = await replica.about_to_update()
        square = await norm.square() if stepping else math.inf
        change = self.change(state, square, port.world)
        state.changed |= change >= self.delta
        decided = self._decided_locally(state.step)
        flag = None
        if decided is None:
            flag = port.all_reduce(replica.weights[0].new_full((1,), state.changed).float(), Op.MAX)
        if decided is not False:  # this step reacts to all changes so far
            state.changed = False
        if self.late:
            flag, state.flag = state.flag, flag
        if self.aggregate == "gradients":
            synced = decided or await _is_raised(flag)
            if synced:
                await average_gradients(replica, port, stepping, math.isfinite(square))
            await replica.update()
        else:
            await replica.update()  # meanwhile the flag travels
            synced = decided or await _is_raised(flag)
            if synced:
                await replica.average(port)
        if not synced and (self.aggregate == "gradients" or self.delta == math.inf):
            port.record(diverged=1.0)  # for good: weights are never averaged again
        if port.rank == 0 and state.step > self.window and self.delta < math.inf:
            self._watch(state, synced, change, port)

    def _watch(self, state: SelSyncState, synced: bool, change: float, port: Port) -> None:
        """Tell once that the replicas train alone: which δ is too large depends on the model and N."""
        if (count := state.count) is None:
            return
        count.add(synced, change)
        if count.steps < WATCHED_STEPS:
            return
        state.count = DecisionCount()
        if count.synced < SELDOM * count.steps / self.period:
            state.count = None
            text = (
                f"only {count.synced} of the last {count.steps} steps synchronized, so replicas train alone, "
                f"and their mean may be a bad model; its gradient changed by {count.largest:.2g} at most, "
                f"delta is {self.delta:g}: choose a smaller one"
            )
            log.warning("SelSync, rank 0: %s", text)
            port.record(Notice("alone", text))

    async def drain(self, state: SelSyncState, replica: Replica, port: Port) -> None:
        if state.flag is not None:  # the next step acts on the flag
            state.flag = Arrived(await state.flag)

    def change(self, state: SelSyncState, square: float, world: int) -> float:
        """Return Δ of the next step, whose squared gradient norm is `square`."""
        state.step += 1
        if not math.isfinite(square):
            return math.inf
        before = state.smoothed
        state.squares = [*state.squares, square][-self.window :]
        state.smoothed = smooth(state.squares, self.smoothing or min(1.0, world / 100))
        return abs(state.smoothed - before) / before if before else math.inf

    def _decided_locally(self, step: int) -> bool | None:
        """Return whether this step synchronizes; None if the workers must exchange flags to decide."""
        if step <= self.window:
            return True
        if self.delta == math.inf or (step - self.window) % self.period:
            return False
        return True if self.delta == 0 else None


def smooth(values: Sequence[float], smoothing: float) -> float:
    """Return the weighted mean, in which each value has 1 − smoothing times the weight of the next."""
    total = weight = 0.0
    for value in values:
        total = total * (1 - smoothing) + value
        weight = weight * (1 - smoothing) + 1
    return total / weight


class BackwardNorm:
    """Norm of this worker's whole gradient, as it is now: computed in one pass, and read later."""

    def __init__(self, replica: Replica) -> None:
        params = [p for block in replica.blocks for p in block.params if p.grad is not None]
        grads = [g.coalesce().values() if g.is_sparse else g for p in params if (g := p.grad) is not None]
        self._members = replica.members
        self._parts = [part_of(p).fraction if self._members.sharded else 1.0 for p in params]
        self._norms = torch._foreach_norm(grads) if grads else []

    async def square(self) -> float:
        """Return the square of the norm, over all members of the worker; a GPU is read once."""
        norms: list[float] = []
        if self._norms:
            device = self._norms[0].device
            norms = torch.stack([norm.to(device) for norm in self._norms]).tolist()
        square = math.fsum(part * norm * norm for part, norm in zip(self._parts, norms, strict=True))
        if not self._members.sharded:
            return square
        return float(await self._members.whole(self._members.vector(square)))


async def average_gradients(replica: Replica, port: Port, stepping: bool, finite: bool) -> None:
    """Replace gradients by their mean over all workers; a gradient that is not finite counts as zero.

    A worker whose optimizer was skipped must not touch its gradients: they are the next step's.
    """
    reductions = []
    for block in replica.blocks:
        own = block.marked if stepping else torch.zeros_like(block.marked)
        reductions.append(port.all_reduce(own if finite else own.zero_()))
    replica.buffers.start(port)
    for block, pending in zip(replica.blocks, reductions, strict=True):
        await pending
        if stepping:
            block.hand_out()
    await replica.buffers.finish()


async def _is_raised(flag: Pending[Tensor] | None) -> bool:
    return flag is not None and (await flag).item() > 0
