"""The parameter server's half of a strategy, as `Strategy.server_half` declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offbeat.codecs import Codec
from offbeat.server.aggregation import Immediate, MakeAggregation
from offbeat.server.rule import Rule


@dataclass(frozen=True, kw_only=True)
class ServerHalf:
    """A strategy's configuration of the parameter server. Every shard and every client builds its own."""

    rule: Rule[Any]
    """Rule that decides when a worker may continue."""

    aggregation: MakeAggregation = Immediate
    """Factory of the aggregation, which decides when a push becomes part of the weights."""

    push_codecs: tuple[Codec, ...] = ()
    """Codecs that may compress a push, numbered from 1; number 0 sends a push uncompressed.

    The worker itself takes care of the residual of a lossy codec.
    """

    pull_codec: Codec | None = None
    """Codec of the weights that workers train on; None: uncompressed, as evaluations always read them."""

    owns_optimizer: bool = False
    """True if the server has the optimizer, and workers push gradients."""
