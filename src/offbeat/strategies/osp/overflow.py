"""Overflow and clipping of late gradients, which the user's loop does not see: each worker has its own.

Late gradients must be changed as the loop changes the visible ones: they are multiplied by the same factor
(unscaling, clipping by norm). And an overflow among them must be found by the GradScalers of all workers, or
of none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.core.blocks import Block
from offbeat.core.finite import nan_if_not_finite
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError

TINY = 1e-30  # a norm that may be rounded to anything
ROUNDING = 8  # roundings of an element on its way through unscaling and clipping
LEAST_CHANGE = 1e-4


def flag_overflow(hidden: Iterable[Block], flagged: Block) -> None:
    """Put NaN into the last mark of `flagged`, which is averaged next, if a hidden gradient is not finite."""
    for block in hidden:
        flagged.marks[-1] += nan_if_not_finite(block.grad).to(flagged.marks.device)


def propagate_overflow(visible: Sequence[Block], flagged: Block) -> None:
    """Put NaN into the first visible gradient if any rank overflowed, so that every GradScaler skips."""
    flag = flagged.marks[-1] * 0
    for block in visible:
        for param, offset in zip(block.params, block.offsets, strict=True):
            if param.grad is not None and param.numel():
                block.grad[offset] += flag.to(block.grad.device)
                return


@dataclass(frozen=True)
class GradientNorms:
    """The norm of each visible gradient, at one moment of the loop."""

    names: list[str]
    norms: Tensor
    tolerance: float  # of a ratio of two norms, by rounding

    @classmethod
    def of(cls, blocks: Iterable[Block]) -> GradientNorms:
        """Return the norms of the blocks' gradients, as the loop sees them."""
        pairs = [pair for block in blocks for pair in zip(block.names, block.params, strict=True)]
        grads = [param.grad for _, param in pairs if param.grad is not None]
        if not grads:
            return cls([], torch.zeros(0), 0.0)
        wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
        norms = torch._foreach_norm(grads, 2, dtype=wide)
        names = [name for name, param in pairs if param.grad is not None]
        coarsest = max(torch.finfo(dtype).eps for dtype in {grad.dtype for grad in grads})
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
        return cls(names, stacked, max(ROUNDING * coarsest, LEAST_CHANGE))

    def check_scaled(self, after: GradientNorms) -> None:
        """Raise an error if the loop has done more to these gradients than to scale all of them alike."""
        changed = sorted({*self.names} ^ {*after.names})
        if not changed and self.names:
            before, now = self.norms, after.norms.to(self.norms.dtype)
            usable = (before.isfinite() & now.isfinite() & (before > TINY)).tolist()
            ratios = (now / before).tolist()
            whole = (now.norm() / before.norm()).item()
            off = max(self.tolerance, after.tolerance) * max(whole, TINY)
            known = zip(self.names, ratios, usable, strict=True)
            changed = [name for name, ratio, used in known if used and abs(ratio - whole) > off]
        if changed:
            raise OffbeatError(
                f"the loop has changed the gradient of {changed[0]} by itself, between backward() and "
                "optimizer.step() (clipping by value, noise, grad = None, a factor for one layer). osp sends "
                "some gradients late, which the loop does not see: it can follow one factor for all of them, "
                "as of clipping by norm, and nothing else. BSP, LocalSGD, SelSync and DiLoCo show all "
                "gradients"
            )


class VisibleNorms:
    """The gradients that the loop sees, before and after it has changed them."""

    def __init__(self, replica: Replica, blocks: Sequence[Block]) -> None:
        self._replica = replica
        self._blocks = blocks
        self._before = GradientNorms.of(blocks)
        self._after: GradientNorms | None = None

    def look(self) -> None:
        """Look at the gradients just before the optimizer steps: nesterov momentum is added in place.

        Where a fused optimizer unscales them, or a second one is yet to step, they change until all have.
        """
        if not self._replica.optimizer.unscales and len(self._replica.optimizer.optimizers) == 1:
            self._after = GradientNorms.of(self._blocks)

    def check_scaled(self) -> None:
        """Raise an error if the loop has done more to the gradients than to scale all of them alike."""
        self._before.check_scaled(self._changed())

    async def factor(self) -> Tensor:
        """Return the factor by which the loop multiplied; exactly 1 if it changed nothing or all is 0."""
        before, after = await self._whole(self._before), await self._whole(self._changed())
        return (after / before).nan_to_num_(1.0, 1.0, 1.0)

    def _changed(self) -> GradientNorms:
        return GradientNorms.of(self._blocks) if self._after is None else self._after

    async def _whole(self, norms: GradientNorms) -> Tensor:
        """Return the norm of all visible gradients; of a sharded model, over the parts of all members."""
        norm: Tensor = norms.norms.norm()
        members = self._replica.members
        if not members.sharded:
            return norm
        square = norm.double().to(members.device).square().reshape(1)
        return (await members.whole(square)).sqrt().to(norm.dtype).squeeze(0)
