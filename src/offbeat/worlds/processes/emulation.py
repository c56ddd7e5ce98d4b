"""Shaping: a port that pretends its NIC is slower. For demonstrations: benchmarks shape real links."""

from __future__ import annotations

import time
from threading import Lock

from offbeat.core.ledger import Ledger


class Shaper:
    """Delivers no sooner than a NIC of the given bandwidth could, one operation after the other."""

    def __init__(self, bits_per_s: float, ledger: Ledger) -> None:
        self.bytes_per_s = bits_per_s / 8
        self._ledger = ledger
        ledger.emulate_transfers()
        self._free_at = 0.0
        self._lock = Lock()

    def deliver(self, nbytes: int) -> float:
        """When an operation that really ended just now would have ended on the slower NIC.

        Loopback is fast, so the real end is about when the last rank arrived: there the transfer starts.
        """
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.bytes_per_s
            return self._free_at

    def delivered(self, nbytes: int) -> None:
        """It has ended there, too."""
        self._ledger.communicated(nbytes / self.bytes_per_s)
