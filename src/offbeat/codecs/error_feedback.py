"""ErrorFeedback: what did not travel is kept, and added to what is sent next.

    sent = C(x + r);   r ← x + r − decoded(sent)

So nothing is lost, only late: all that was sent and what is kept add up to all that there was. If the
codec inside loses at most a part 1 − δ of a square norm each time, r stays below 2√(1 − δ)/δ times the
largest ‖x‖.

Where x is not finite, r stays as it was. What was sent into a step that is then skipped is lost with that
step. Under a GradScaler, r is in the scale of the step it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Matrix, Stream
from offbeat.codecs.cuda import ops as kernels
from offbeat.core.finite import nan_if_not_finite
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.errors import SettingError


@dataclass
class Residual:
    error: Tensor
    inner: Any  # what the codec inside remembers
    not_finite: Tensor | None = field(
        default=None, metadata={"saved": False}
    )  # whether x is, where it is known


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Keep what `codec` loses, and send it later."""

    name = "error_feedback"

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise SettingError(
                f"error feedback needs a codec to go around, such as TopK(0.01), not {self.codec!r}"
            )
        if isinstance(self.codec, ErrorFeedback):
            raise SettingError("error feedback around error feedback: the inner one leaves nothing to keep")
        if not self.codec.contractive:
            raise SettingError(
                f"error feedback around {self.codec}: it may lose more than there was, so what is kept would"
                " grow without end; it needs none, as its mean is right"
            )

    @property
    def splittable(self) -> bool:  # type: ignore[override]
        return self.codec.splittable

    @property
    def summable(self) -> bool:  # type: ignore[override]
        return self.codec.summable

    @property
    def wire_ratio(self) -> float:
        return self.codec.wire_ratio

    def init(self, like: Tensor, matrices: Sequence[Matrix] = ()) -> Residual:
        return Residual(torch.zeros_like(like), self.codec.init(like, matrices))

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.codec.nbytes(numel, dtype)

    def encode(self, memory: Residual, tensor: Tensor, packet: Tensor) -> None:
        _add_error(memory, tensor)
        self.codec.encode_residual(memory.inner, tensor, packet)
        _keep(memory, tensor)

    take = encode  # that leaves in the tensor what does not travel

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        self.codec.accumulate(packet, into, factor)

    def decode(self, packet: Tensor, into: Tensor) -> None:
        self.codec.decode(packet, into)

    def summands(self, packet: Tensor, dtype: torch.dtype) -> Tensor:
        return self.codec.summands(packet, dtype)

    def stream(
        self, like: Tensor, matrices: Sequence[Matrix] = (), lane: Lane = Lane.FRONT, one_way: bool = False
    ) -> Stream:
        return Stream(
            Residual(torch.zeros_like(like), self.codec.stream(like, matrices, lane, one_way)), lane
        )

    def start(self, wire: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        _add_error(wire.memory, tensor)
        return self.codec.start(wire.memory.inner, tensor, port, remainder=True)

    async def exchange(
        self, wire: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        turned = await self.codec.exchange(wire.memory.inner, tensor, port, sent, remainder=True)
        _keep(wire.memory, tensor)
        return turned

    async def finish(self, wire: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        await self.codec.finish(wire.memory.inner, into, port, sent)


def _add_error(memory: Residual, tensor: Tensor) -> None:
    if kernels.fits(tensor):
        memory.not_finite = kernels.add_up(tensor, memory.error)
    else:
        tensor.add_(memory.error)


def _keep(memory: Residual, remainder: Tensor) -> None:
    if memory.not_finite is not None:
        kernels.keep(memory.not_finite, remainder, memory.error)
        return
    off = nan_if_not_finite(remainder)
    if off.is_cuda:  # to look would make the host wait
        torch.where(off == 0, remainder, memory.error, out=memory.error)
    elif off == 0:
        memory.error.copy_(remainder)
