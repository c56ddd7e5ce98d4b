"""Staging: pinned memory between a GPU and the wire. Tensors on the CPU need no staging."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offbeat.server.messages import Tensors


class Staging:
    """The staging buffers of one shard's messages, each reused when its operation has ended."""

    def __init__(self) -> None:
        self._sending: dict[int, PinnedBuffers] = {}  # by size
        self._receiving: dict[int, PinnedBuffers] = {}

    def send(self, tensors: Tensors, own_copy: bool = False) -> tuple[Tensors, Callable[[], None]]:
        """Return the tensors in the CPU's memory, and a function that waits until they are complete.

        With `own_copy` the memory is not shared: several such operations may be in progress at once.
        """
        if not _on_gpu(tensors):
            return tensors, _no_wait
        if own_copy:
            return [tensor.cpu() for tensor in tensors], _no_wait
        buffers = _buffers(self._sending, tensors)
        buffers.copy_from(tensors)
        return buffers.host, buffers.synchronize

    def receive(self, into: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Return memory to receive into, and a function that copies the received data into `into`."""
        if not _on_gpu(into):
            return into, _no_wait
        buffers = _buffers(self._receiving, into)
        buffers.synchronize()  # the data received before has been copied
        return buffers.host, lambda: buffers.copy_to(into)


class PinnedBuffers:
    """Pinned memory of the same layout as some tensors on a GPU."""

    def __init__(self, tensors: Tensors) -> None:
        self.host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        self._copied = torch.cuda.Event()

    def synchronize(self) -> None:
        """Block until the last copy has ended."""
        self._copied.synchronize()

    def copy_from(self, tensors: Tensors) -> None:
        """Start to copy from the GPU, after the work already queued on its stream."""
        for host, device in zip(self.host, tensors, strict=True):
            host.copy_(device, non_blocking=True)
        self._copied.record()

    def copy_to(self, tensors: Tensors) -> None:
        """Start to copy to the GPU, in the order of its stream."""
        for device, host in zip(tensors, self.host, strict=True):
            device.copy_(host, non_blocking=True)
        self._copied.record()


def _buffers(pool: dict[int, PinnedBuffers], tensors: Tensors) -> PinnedBuffers:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes not in pool:
        pool[nbytes] = PinnedBuffers(tensors)
    return pool[nbytes]


def _on_gpu(tensors: Tensors) -> bool:
    return bool(tensors) and tensors[0].is_cuda


def _no_wait() -> None:
    """Wait for nothing: the tensors are in the CPU's memory."""
