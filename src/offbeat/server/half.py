"""The parameter server's half of a strategy, as `Strategy.server_half` declares it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.optim import ASGD, SGD, Optimizer

from offbeat.codecs import Codec
from offbeat.core.strategy import Strategy
from offbeat.server.aggregation import Immediate, MakeAggregation
from offbeat.server.rule import Rule

log = logging.getLogger("offbeat")


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

    @property
    def cuts_anywhere(self) -> bool:
        """True if more shards cost no bytes, and each applies a push at once (`server/pieces.py`)."""
        codecs = [*self.push_codecs, *([self.pull_codec] if self.pull_codec else [])]
        return self.adds_at_once and all(codec.cuts_anywhere for codec in codecs)

    @property
    def wire_ratio(self) -> float:
        """Size of a push or of pulled weights, whichever is larger, as a fraction of the weights' size."""
        push = max((codec.wire_ratio for codec in self.push_codecs), default=1.0)
        return max(push, self.pull_codec.wire_ratio if self.pull_codec else 1.0)

    @property
    def adds_at_once(self) -> bool:
        """True if the server applies every push when it arrives."""
        return isinstance(self.aggregation, type) and issubclass(self.aggregation, Immediate)

    in_step: bool = True
    """True if all workers do equally many steps; False: each may do as many as it can."""

    outer_sgd: Mapping[str, Any] | None = None
    """Settings of a torch SGD with which the server steps its weights; pushes are its gradients."""

    owns_optimizer: bool = False
    """True if the server has the optimizer, and workers push gradients."""


@runtime_checkable
class OpenToOptimizers(Protocol):
    """A strategy with settings that the optimizers decide, unless they are given."""

    def for_optimizers(self, optimizers: Sequence[Optimizer]) -> Strategy[Any]:
        """Return the strategy with which these optimizers train."""
        ...


def for_optimizers(strategy: Strategy[Any], optimizers: Sequence[Optimizer]) -> Strategy[Any]:
    """Return the strategy with which these optimizers train.

    Both worlds call this first, before a server is started and ranks compare their settings.
    """
    return strategy.for_optimizers(optimizers) if isinstance(strategy, OpenToOptimizers) else strategy


def log_caution(strategy: Strategy[Any], optimizers: Sequence[Optimizer]) -> None:
    """Log a warning if the server adds up updates whose mean is not the update of the mean gradient.

    Or if the server has the optimizer, and the worker's has a state (momentum) that the server does not know.
    """
    half = strategy.server_half()
    if half is not None and half.owns_optimizer and any(each.state for each in optimizers):
        log.warning(
            "under %s the server steps, and begins without the state (momentum and the like) that the "
            "optimizer has from earlier steps. To resume, load sync.state_dict(); else expect a new start of "
            'the moments, or use push="update"',
            strategy.name,
        )
    adaptive = [type(each).__name__ for each in optimizers if not is_linear(each)]
    if half is None or half.owns_optimizer or not half.adds_at_once or not adaptive:
        return
    log.warning(
        '%s with push="update" and %s: the server adds up the workers\' updates. Their mean is a shorter '
        "step than that of %s with the mean gradient, so BSP's learning rate is too small. Raise it, or try "
        'push="gradient"; see docs/strategies/ssp.md',
        strategy.name,
        adaptive[0],
        adaptive[0],
    )


def is_linear(optimizer: Optimizer) -> bool:
    """Return whether the mean of several workers' updates is the update of their mean gradient."""
    return isinstance(optimizer, SGD | ASGD) or getattr(optimizer, "linear_rate", False)
