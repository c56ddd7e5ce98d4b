"""Codecs: what travels instead of a tensor. One codec, one file; plugins follow (`core/plugins.py`)."""

from offbeat.codecs.base import Codec, Stream
from offbeat.codecs.cast import BFloat16, Half
from offbeat.codecs.error_feedback import ErrorFeedback
from offbeat.codecs.parse import parse_codec
from offbeat.codecs.powersgd import PowerSGD
from offbeat.codecs.quantize import Quantize
from offbeat.codecs.randomk import RandomK
from offbeat.codecs.setting import CodecField, CodecSetting
from offbeat.codecs.topk import TopK
from offbeat.core.plugins import Catalog

_OWN = (TopK, RandomK, Quantize, Half, BFloat16, PowerSGD, ErrorFeedback)
CODECS: Catalog[Codec] = Catalog("codec", "offbeat.codecs", Codec, {cls.name: cls for cls in _OWN})


def codec(text: str) -> Codec:
    """Build the codec that a text names, such as `error_feedback(topk(0.01))`."""
    return parse_codec(text, CODECS)


__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "CodecField",
    "CodecSetting",
    "ErrorFeedback",
    "Half",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Stream",
    "TopK",
    "codec",
]
