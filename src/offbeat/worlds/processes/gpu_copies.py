"""Copies between a GPU and the host, for exchanges over gloo, whose messages need host memory.

The copies have a stream of their own: on the stream of the training they would wait for it, and it for them.
They are made piece by piece, so that one piece is sent while the next is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


class NoCopies:
    """Copies of tensors that are in host memory: there is nothing to do. Base of `GpuCopies`."""

    def read(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Start to copy these pieces of all tensors that are sent to the host, in this order."""

    def wait(self) -> None:
        """Wait for the next piece that `read` copies."""

    def write(self, start: int, stop: int) -> None:
        """Start to copy this piece of all tensors that were received to the GPU."""

    def read_all(self) -> None:
        """Copy all tensors that are sent to the host."""
        self.read([(0, 1 << 62)])
        self.wait()

    def write_all(self) -> None:
        """Start to copy all tensors that were received to the GPU."""
        self.write(0, 1 << 62)

    def finish(self) -> None:
        """Wait for all copies."""


class GpuCopies(NoCopies):
    """Copies of tensors on a GPU; pairs of flat tensors are a source and its target, in pinned memory."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        reads: Sequence[tuple[Tensor, Tensor]],
        writes: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._stream = stream
        self._reads = reads
        self._writes = writes
        self._copied: deque[torch.cuda.Event] = deque()

    def read(self, pieces: Sequence[tuple[int, int]]) -> None:
        for start, stop in pieces:
            for source, target in self._reads:
                target[start:stop].copy_(source[start:stop], non_blocking=True)
            self._copied.append(self._stream.record_event())

    def wait(self) -> None:
        self._copied.popleft().synchronize()

    def write(self, start: int, stop: int) -> None:
        for source, target in self._writes:
            target[start:stop].copy_(source[start:stop], non_blocking=True)

    def finish(self) -> None:
        self._stream.synchronize()
