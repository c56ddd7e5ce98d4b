"""A histogram of synchronized steps over a run, with at most 256 bins however long the run is."""

from __future__ import annotations

from typing import Any

MOST = 256  # bins


class SyncHistogram:
    """Counts of synchronized steps in bins of equal width; when the bins are full, pairs are merged."""

    def __init__(self) -> None:
        self._width = 1
        self._steps = 0
        self._before = 0
        self._synced: list[int] = []

    def step(self, sync_steps: int) -> None:
        """Count one more step; `sync_steps` is how many steps have synchronized so far."""
        if self._steps % self._width == 0:
            if len(self._synced) == MOST:
                self._synced = [a + b for a, b in zip(self._synced[::2], self._synced[1::2], strict=True)]
                self._width *= 2
            self._synced.append(0)
        self._synced[-1] += sync_steps - self._before
        self._before = sync_steps
        self._steps += 1

    def to_json(self) -> dict[str, Any]:
        """Return the histogram as `decisions` in details.json."""
        return {"steps": self._steps, "width": self._width, "synced": self._synced}
