"""ErrorFeedback: the error of an encoding is stored, and added to the next tensor before that is encoded.

    sent = C(x + d r);   r ← x + d r − decoded(sent)          d: `decay`, 1 unless told otherwise

With d = 1 nothing is lost, only delayed: the sum of all that was sent, plus r, is the sum of all x. With
d < 1, what waits longer counts less: of an entry that has waited for t encodings dᵗ is left. If the codec
inside is contractive, with an error of at most a fraction 1 − δ of the squared norm, r stays below
2√(1 − δ)/δ times the largest ‖x‖, and with d below √(1 − δ)/(1 − d√(1 − δ)) times.

Where x is not finite, r stays as it was. If a step is skipped after sending, what it sent is lost. Under a
GradScaler, r has the scale of the step that it stems from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Stream
from offbeat.codecs.cuda import ops
from offbeat.core.blocks import Matrix
from offbeat.core.fields import Instance, Number
from offbeat.core.finite import nan_if_not_finite
from offbeat.core.pending import Pending
from offbeat.core.port import Lane, Port
from offbeat.errors import SettingError

NEEDED = "error feedback needs an inner codec, such as TopK(0.01)"


@dataclass
class Residual:
    """The error that is still to be sent, and the inner codec's memory."""

    error: Tensor
    inner: Any
    # On a GPU: one number, 0 if the latest x + r was finite
    not_finite: Tensor | None = field(default=None, metadata={"saved": False})


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Wrapper of `codec` that sends its errors later."""

    name = "error_feedback"
    summary = "another codec, whose errors are sent later"

    codec: Annotated[Codec, Instance("codec whose errors are sent later", of=Codec, noun=NEEDED)]

    decay: Annotated[
        float, Number("factor of a stored error, each time it is added to a tensor", above=0, at_most=1)
    ] = 1.0

    def check(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise SettingError("error feedback around error feedback: the inner one leaves no error")
        if not self.codec.contractive:
            raise SettingError(
                f"error feedback around {self.codec}: its error may be larger than the tensor, so the stored "
                "error would grow without bound; use the codec alone, since it is unbiased"
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
        self._add_error(memory, tensor)
        self.codec.encode_residual(memory.inner, tensor, packet)
        _store_error(memory, tensor)

    encode_residual = encode  # which leaves the residual in the tensor already

    def accumulate(self, packet: Tensor, into: Tensor, factor: float = 1.0) -> None:
        self.codec.accumulate(packet, into, factor)

    def decode(self, packet: Tensor, into: Tensor) -> None:
        self.codec.decode(packet, into)

    def summands(self, packet: Tensor, dtype: torch.dtype) -> Tensor:
        return self.codec.summands(packet, dtype)

    def stream(
        self,
        like: Tensor,
        matrices: Sequence[Matrix] = (),
        lane: Lane = Lane.FRONT,
        single_phase: bool = False,
    ) -> Stream:
        inner = self.codec.stream(like, matrices, lane, single_phase)
        return Stream(Residual(torch.zeros_like(like), inner), lane)

    def start(self, stream: Stream, tensor: Tensor, port: Port, remainder: bool = False) -> Pending[Any]:
        self._add_error(stream.memory, tensor)
        return self.codec.start(stream.memory.inner, tensor, port, remainder=True)

    async def exchange(
        self, stream: Stream, tensor: Tensor, port: Port, sent: Pending[Any], remainder: bool = False
    ) -> Pending[Any]:
        sent = await self.codec.exchange(stream.memory.inner, tensor, port, sent, remainder=True)
        _store_error(stream.memory, tensor)
        return sent

    def _add_error(self, memory: Residual, tensor: Tensor) -> None:
        if self.decay == 1 and ops.supports(tensor):
            memory.not_finite = ops.add_and_check(tensor, memory.error)
        else:
            tensor.add_(memory.error, alpha=self.decay)

    async def finish(self, stream: Stream, into: Tensor, port: Port, sent: Pending[Any]) -> None:
        await self.codec.finish(stream.memory.inner, into, port, sent)


def _store_error(memory: Residual, remainder: Tensor) -> None:
    """Make `remainder` the new error, unless it is not finite."""
    if memory.not_finite is not None:
        ops.copy_if_finite(memory.not_finite, remainder, memory.error)
        return
    nan = nan_if_not_finite(remainder)
    if nan.is_cuda:  # reading it here would make the host wait
        torch.where(nan == 0, remainder, memory.error, out=memory.error)
    elif nan == 0:
        memory.error.copy_(remainder)
