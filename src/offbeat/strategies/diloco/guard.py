"""Guard of DiLoCo: leaves a worker out of a merge if its outer gradient is an outlier.

    Δ_i = w_global − w_i, of the fragment;   n_i = ‖Δ_i‖;   s_i = A Δ_i, with A of random signs, 1024 rows
    out:   n_i is not finite, or n_i > ν · median of the finite n_j
    then,  while three or more are left: the one with the least cosine of s_i and the sum of the others' s_j,
           if that is below κ
    Δ ← the mean over those who are left; if none is left, Δ is 0

ν is `outlier_norm`, κ `outlier_cosine`. A worker that is left out starts again from w_global, and keeps its
inner optimizer. If nobody is left out, nothing is changed: the result is the same, bit for bit.

The idea (EDiT, arXiv 2412.07210, read in its abstract): an outer gradient whose norm is an outlier is left
out, and said so. Ours: everything else.

- Before a fragment is sent, all workers exchange n_i, and s_i where κ is set: 8 or 8200 bytes each. All wait
  for the last one there, also where a delay hides the fragment itself.
- E⟨s_i, s_j⟩ = ⟨Δ_i, Δ_j⟩: the cosines are right to about 0.03, so κ is best at or below 0.
- All workers decide by the same numbers with the same arithmetic, Python's own, so they always agree.
- Of even numbers of norms the lower middle is the median: of two workers the longer one can be out.
- Who is left out sends zeros, and the mean is scaled up.
- A copy of w_global, from which Δ_i is measured, is one more copy of the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor

from offbeat.core.port import Port

ROWS = 1024  # numbers of a sketch
PIECE = 1 << 10  # rows of the change that are looked at at a time
log = logging.getLogger("offbeat")


@dataclass
class Guard:
    """The guard's state on one worker. `anchor` has one tensor per dtype and device."""

    anchor: list[Tensor] = field(default_factory=list)  # w_global as of each fragment's last merge
    left: int = 0  # workers that count in the fragment in flight
    is_out: bool = False  # this worker does not
    count: int = 0  # how often it did not

    async def judge(
        self,
        own: Sequence[Tensor],
        anchors: Sequence[Tensor],
        norm_limit: float | None,
        cosine_limit: float | None,
        port: Port,
    ) -> None:
        """Decide who counts in the fragment that is about to be sent; `anchors` are its parts of `anchor`."""
        rows = ROWS if cosine_limit is not None else 0
        device = own[0].device
        slices = [torch.zeros(1 + rows, dtype=torch.float64, device=device) for _ in range(port.world)]
        measure(own, anchors, slices[port.rank])
        measured = torch.stack(await port.all_gather(slices)).tolist()
        norms, sketches = [line[0] for line in measured], [line[1:] for line in measured]
        out = find_outliers(norms, sketches, norm_limit, cosine_limit)
        self.left, self.is_out = port.world - len(out), port.rank in out
        if self.is_out:
            self.count += 1
            log.log(
                logging.WARNING if self.count == 1 else logging.DEBUG,
                "the change of this worker was left out of a merge as an outlier: its norm is %.3g, the "
                "median %.3g; further ones are only counted",
                norms[port.rank],
                _median(norms),
            )
        port.record(outliers=self.count)


def measure(own: Sequence[Tensor], anchors: Sequence[Tensor], into: Tensor) -> None:
    """Write the norm of own − anchor, and its sketch where there is room, into a vector."""
    total = into.new_zeros(())
    rows = into.numel() - 1
    for number, (weight, anchor) in enumerate(zip(own, anchors, strict=True)):
        step = PIECE * ROWS
        for start in range(0, weight.numel(), step):
            change = (weight[start : start + step] - anchor[start : start + step]).double()
            total += change.square().sum()
            if rows:
                lines = torch.nn.functional.pad(change, (0, -change.numel() % ROWS)).view(-1, ROWS)
                seed = torch.Generator().manual_seed(1000 * number + start // step)
                signs = torch.randint(0, 2, (len(lines),), generator=seed).mul_(2).sub_(1)
                into[1:] += signs.to(lines) @ lines
    into[0] = total.sqrt()


def find_outliers(
    norms: Sequence[float],
    sketches: Sequence[Sequence[float]],
    norm_limit: float | None,
    cosine_limit: float | None,
) -> set[int]:
    """Return the numbers of the workers that are left out. All workers compute the same, bit for bit."""
    middle = _median(norms)
    out = {i for i, norm in enumerate(norms) if not math.isfinite(norm)}
    if norm_limit is not None:
        out |= {i for i, norm in enumerate(norms) if norm > norm_limit * middle}
    left = [i for i in range(len(norms)) if i not in out]
    while cosine_limit is not None and len(left) > 2:
        total = [math.fsum(column) for column in zip(*(sketches[i] for i in left), strict=True)]
        cosines = {i: _cosine_to_others(sketches[i], total) for i in left}
        worst = min(left, key=lambda i: (cosines[i], i))
        if cosines[worst] >= cosine_limit:
            break
        out.add(worst)
        left.remove(worst)
    return out


def _median(norms: Sequence[float]) -> float:
    """Return the median of the finite norms."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return median_low(finite) if finite else math.nan


def _cosine_to_others(sketch: Sequence[float], total: Sequence[float]) -> float:
    """Return the cosine of a sketch and the rest of the total; 1 where one of them is 0: it has no angle."""
    others = [whole - own for whole, own in zip(total, sketch, strict=True)]
    dot = math.fsum(a * b for a, b in zip(sketch, others, strict=True))
    norms = math.fsum(a * a for a in sketch) * math.fsum(b * b for b in others)
    return dot / math.sqrt(norms) if norms else 1.0
