"""Packets that come to a shard, in place of the updates that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.codecs import Codec
from offbeat.codecs.packing import room, unpack
from offbeat.errors import OffbeatError
from offbeat.messages import Tensors
from offbeat.server import is_finite
from offbeat.worlds.links import Malformed


class Packets:
    """Room for the largest packets that a worker's updates may come as; none, where they come as they are."""

    def __init__(self, codec: Codec | None, update: Tensors) -> None:
        self._codec = codec
        self._update = update
        self._room = room(codec, update) if codec else []

    def expected(self, dial: int) -> Tensors:
        """What is to be received, after a header with such a dial."""
        if self._codec is None:
            if dial:
                raise Malformed("a packet, where updates are expected")
            return self._update
        with _nonsense():
            codec = self._codec.dialled(dial)
        sizes = [codec.nbytes(part.numel(), part.dtype) for part in self._update]
        return [packet[:size] for packet, size in zip(self._room, sizes, strict=True)]

    def unpack(self, received: Tensors) -> bool:
        """Decode what was received, if it is not the update itself; whether that is finite."""
        if self._codec is None:
            return True
        with _nonsense():
            unpack(self._codec, received, self._update)
        return is_finite(self._update)


@contextmanager
def _nonsense() -> Iterator[None]:
    """What a codec refuses was not sent by a worker of ours."""
    try:
        yield
    except OffbeatError as refused:
        raise Malformed(str(refused)) from refused
