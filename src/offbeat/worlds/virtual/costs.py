"""Costs of computing beside the steps, in a cluster file. What was not measured costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from offbeat.core.fields import Number, Text, Whole
from offbeat.core.settings import Settings
from offbeat.core.strategy import Strategy

SecondsPerByte = Annotated[float, Number(noun="seconds per byte", at_least=0, at_most=1)]
Deviation = Annotated[float, Number(noun="a deviation", at_least=0, at_most=3)]
Share = Annotated[float, Number(noun="a fraction", at_least=0, at_most=1)]


@dataclass(frozen=True, kw_only=True)
class CodecCost(Settings):
    """`[[codecs]]`: what a codec costs, by the bytes of its packets."""

    codec: Annotated[str, Text("the codec with its settings, as a strategy has it")]
    encode_s: SecondsPerByte = 0.0
    decode_s: SecondsPerByte = 0.0
    deviation: Deviation = 0.0  # of the logarithm of `encode_s`, from one time to the next


@dataclass(frozen=True, kw_only=True)
class ShardCost(Settings):
    """`[shards]`: how many a host has, what each takes for a push, and whether it is copied."""

    apply_s: SecondsPerByte = 0.0
    exchange_s: SecondsPerByte = 0.0  # of a worker's own time, for what it or a shard beside it exchanges
    beside: Share = 0.0  # 1: both share one core
    pieces: Annotated[int, Whole("shards of a host; 0: as over processes", at_least=0, at_most=256)] = 0
    copies: Annotated[int, Whole("copies of each shard, at the next host", at_least=0, at_most=1)] = 0


FREE = CodecCost(codec="")


def codec_cost(costs: tuple[CodecCost, ...], strategy: Strategy[Any]) -> CodecCost:
    """Return what the codec of a strategy costs: nothing, if it has none or none was measured."""
    return _cost_of(costs, getattr(strategy, "codec", None))


def push_costs(costs: tuple[CodecCost, ...], strategy: Strategy[Any]) -> tuple[CodecCost, ...]:
    """Return what each codec of a strategy's pushes costs: GDTopK has one for each ratio."""
    half = strategy.server_half()
    codecs = () if half is None else half.push_codecs
    own = getattr(strategy, "codec", None)  # which may be one with error feedback
    return tuple(_cost_of(costs, own or codec) for codec in codecs)


def _cost_of(costs: tuple[CodecCost, ...], codec: Any) -> CodecCost:
    return next((cost for cost in costs if codec is not None and cost.codec == str(codec)), FREE)
