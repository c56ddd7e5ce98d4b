"""The parameter server's half of a strategy, as `Strategy.server_half` declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offbeat.codecs import Codec
from offbeat.server.aggregation import Immediate, MakeAggregation
from offbeat.server.rule import Rule


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """What a strategy wants of the parameter server. Every shard and every client builds its own."""

    rule: Rule[Any]
    """Decides when a worker may go on."""

    aggregation: MakeAggregation = Immediate
    """Decides when a push becomes part of the weights."""

    push_codecs: tuple[Codec, ...] = ()
    """Codecs that a push may be compressed by, counted from 1; by 0 it is sent as it is.

    The residual of a lossy codec is the worker's own affair.
    """

    pull_codec: Codec | None = None
    """The codec of weights that workers go on with; evaluations read exact weights. None: exact weights."""

    owns_optimizer: bool = False
    """The server has the optimizer, and workers push gradients."""
