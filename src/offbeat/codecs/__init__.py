"""What goes on the wire instead of a tensor. One codec, one file."""

from offbeat.codecs.base import Codec, Matrix, Stream, exchange_all, exchange_and_finish, finish_all
from offbeat.codecs.bfloat16 import BFloat16
from offbeat.codecs.error_feedback import ErrorFeedback
from offbeat.codecs.half import Half
from offbeat.codecs.parse import parse_codec
from offbeat.codecs.powersgd import PowerSGD
from offbeat.codecs.quantize import Quantize
from offbeat.codecs.randomk import RandomK
from offbeat.codecs.setting import CodecField, CodecSetting
from offbeat.codecs.topk import TopK

CODECS: dict[str, type[Codec]] = {
    cls.name: cls for cls in (TopK, RandomK, Quantize, Half, BFloat16, PowerSGD, ErrorFeedback)
}


def codec(text: str) -> Codec:
    """The codec that a text names, such as `error_feedback(topk(0.01))`."""
    return parse_codec(text, CODECS)


__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "CodecField",
    "CodecSetting",
    "ErrorFeedback",
    "Half",
    "Matrix",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Stream",
    "TopK",
    "codec",
    "exchange_all",
    "exchange_and_finish",
    "finish_all",
]
