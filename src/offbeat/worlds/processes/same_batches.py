"""A warning if all ranks train on the same samples, which costs all but one of them and gains nothing.

Ranks start from the same weights, so the same samples give the same gradients, bit for bit. Each rank posts a
checksum of its first gradient, and rank 0 compares them some steps later, without waiting for anybody.
"""

from __future__ import annotations

import logging
import zlib
from contextlib import suppress

import torch
from torch import Tensor

from offbeat.core.port import CollectivePort
from offbeat.errors import RankLost
from offbeat.worlds.processes.port import ProcessPort

ELEMENTS = 4096  # of the gradient that are looked at
PATIENCE_S = 5.0  # with the store
LAST_LOOK = 1024  # the step after which rank 0 no longer looks
log = logging.getLogger("offbeat")


class SameBatches:
    """One rank's part in the comparison of the first gradients."""

    def __init__(self, port: CollectivePort) -> None:
        self._rank, self._world = port.rank, port.world
        self._noted = self._compared = True
        if isinstance(port, ProcessPort) and not port.standalone and port.world > 1:
            self._store = port.failures.store.within(PATIENCE_S).prefixed("first gradient")
            self._noted, self._compared = False, port.rank > 0

    def note(self, gradient: Tensor | None) -> None:
        """Post the checksum of this rank's first gradient, before anything is exchanged."""
        if self._noted or gradient is None:
            return
        self._noted = True
        local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local = local.coalesce().values() if local.is_sparse else local
        part = local.detach().reshape(-1)[:ELEMENTS].cpu().contiguous()
        # Zeros, as of a part which starts switched off, or an overflow say nothing about the samples.
        tells = bool(part.any()) and bool(part.isfinite().all())
        checksum = zlib.crc32(part.view(torch.uint8).numpy().tobytes())
        text = str(checksum) if tells else f"nothing from {self._rank}"
        with suppress(RankLost):  # training does not end for want of a warning
            self._store.set(str(self._rank), text)

    def compare(self, step: int) -> None:
        """Warn if all ranks have posted the same: at rank 0, after steps 2, 4, 8 and so on."""
        if self._compared or step < 2 or step & (step - 1):
            return
        self._compared = step >= LAST_LOOK
        with suppress(RankLost):
            self._compared = self._compare() or self._compared

    def _compare(self) -> bool:
        """Return whether all ranks have posted."""
        keys = [str(rank) for rank in range(self._world)]
        if not self._store.check(keys):
            return False
        if len({self._store.get(key) for key in keys}) == 1:
            log.warning(
                "all %d ranks had the same gradients in their first step, so they train on the same samples: "
                "give each rank its own, for example by torch.utils.data.DistributedSampler",
                self._world,
            )
        return True
