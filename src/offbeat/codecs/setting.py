"""The setting of a strategy that takes a codec."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from offbeat.codecs.base import Codec
from offbeat.core.fields import FieldError, Instance

MEANING = "codec that compresses the tensors that are sent; None: they are sent as they are"


@dataclass(frozen=True)
class CodecField(Instance):
    """A codec; with `splittable` (a reason), one that can encode any slice of a tensor by itself."""

    meaning: str = MEANING
    _: KW_ONLY
    of: type[Any] = Codec
    noun: str = "a codec, such as ErrorFeedback(TopK(0.01))"
    splittable: str = ""

    def read(self, value: Any) -> Any:
        codec = super().read(value)
        if self.splittable and not codec.splittable:
            expected = f"a codec that can encode slices of a tensor by themselves ({self.splittable})"
            raise FieldError((), expected, given=codec)
        return codec


CodecSetting = Annotated[Codec | None, CodecField()]
