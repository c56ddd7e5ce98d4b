"""The table of contenders: who builds each, and the settings that are tried.

Whoever has settings that matter gets the same number of tries, `TRIES`, at every rate; DiLoCo, the peer's as
ours, `DILOCO_TRIES`, as its period and its outer learning rate belong together. The others have one.
Lengths of local phases run over the same values for all; a task of few steps has them shorter, for all alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.training import Bench, Training

PEER, OURS, LIMIT = "peer", "ours", "limit"
TRIES, DILOCO_TRIES = 4, 6
PERIODS = (32, 64, 16, 128)  # likely ones first: those that are much later than the best so far are cut short
FOUR_BITS = "error_feedback(quantize(4))"
STEPS = ("period", "sync_every", "steps", "delay")  # what is counted in steps


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    kind: str  # PEER, OURS or LIMIT
    builder: str  # file.function; imported where it is used, as not everybody has the peers' libraries
    needs: str = "torch"  # to be installed
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tries: tuple[Mapping[str, Any], ...] = ({},)

    def tries_at(self, shorter: int) -> tuple[Mapping[str, Any], ...]:
        """The settings to try, with local phases, and what may hide behind them, so many times as short."""
        return tuple(
            {name: value // shorter if name in STEPS else value for name, value in tried.items()}
            for tried in self.tries
        )

    def open(self, bench: Bench) -> AbstractContextManager[Training]:
        module, _, function = self.builder.partition(".")
        made = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)(bench)
        assert isinstance(made, AbstractContextManager)
        return made


def peer(name: str, builder: str, needs: str = "torch", **more: Any) -> Contender:
    return Contender(name=name, kind=PEER, builder=builder, needs=needs, **more)


def ours(name: str, *tries: Mapping[str, Any], **fixed: Any) -> Contender:
    """By default the name is the strategy's."""
    return Contender(
        name=name, kind=OURS, builder="ours.attached", fixed={"strategy": name, **fixed}, tries=tries or ({},)
    )


def each(setting: str, values: tuple[Any, ...], **more: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({setting: value, **more} for value in values)


_ALL = (
    Contender(name="no_exchange", kind=LIMIT, builder="torch_native.alone"),
    peer("ddp", "torch_native.ddp"),
    peer("ddp_fp16", "torch_native.ddp", fixed={"fp16": True}),
    peer(
        "post_local_sgd",
        "torch_native.post_local_sgd",
        tries=each("period", PERIODS, start=0),
    ),
    peer("torchft_local_sgd", "torchft_peer.local_sgd", "torchft", tries=each("sync_every", PERIODS)),
    peer(
        "torchft_diloco",
        "torchft_peer.diloco",
        "torchft",
        tries=(
            {"sync_every": 32, "outer_lr": 0.4},
            {"sync_every": 64, "outer_lr": 0.7},
            {"sync_every": 128, "outer_lr": 0.7},
            {"sync_every": 16, "outer_lr": 0.3},
            {"sync_every": 24, "outer_lr": 0.55},
            {"sync_every": 32, "outer_lr": 0.55},
        ),
    ),
    peer("accelerate_local_sgd", "accelerate_peer.local_sgd", "accelerate", tries=each("steps", PERIODS)),
    ours("local_sgd", *each("period", PERIODS)),
    ours("local_sgd+quantize", strategy="local_sgd", codec="error_feedback(quantize(8))", period=32),
    ours(
        "diloco",
        {"period": 32, "outer_lr": 0.4},
        {"period": 64, "delay": 24},
        {"period": 16, "outer_lr": 0.3},
        {"period": 32, "outer_lr": 0.4, "delay": 8},
        {"period": 24, "outer_lr": 0.55},
        {"period": 24, "outer_lr": 0.55, "delay": 3, "codec": "bfloat16"},
    ),
    ours(
        "diloco+4bit",
        {"period": 32, "outer_lr": 0.4, "delay": 4},
        {"period": 16, "outer_lr": 0.3, "delay": 4},
        {"period": 32, "outer_lr": 0.4, "delay": 8},
        {"period": 16, "outer_lr": 0.3, "delay": 8},
        {"period": 24, "outer_lr": 0.55, "delay": 4},
        {"period": 32, "outer_lr": 0.55, "delay": 4},
        strategy="diloco",
        codec=FOUR_BITS,
    ),
    ours(  # this and the next as a table of steps advises, that was made with other seeds: no search
        "diloco+average",
        {"period": 24, "outer_lr": 0.7, "delay": 3},
        strategy="diloco",
        average=0.7,
        codec="bfloat16",
    ),
    ours(
        "diloco+4bit+average",
        {"period": 24, "outer_lr": 0.7, "delay": 4},
        strategy="diloco",
        average=0.7,
        codec=FOUR_BITS,
    ),
    ours("selsync", *each("delta", (0.12, 0.2)), {"delta": 0.2, "late": True}, {"delta": 0.12, "period": 8}),
    ours("bsp"),
    ours("bsp+topk", strategy="bsp", codec="error_feedback(topk(0.01))"),
    ours("bsp+powersgd", strategy="bsp", codec="error_feedback(powersgd(4))"),
    ours("osp"),
    ours("ssd_sgd", warmup=50, delay=5),
    ours("oscars"),
    ours("oscars+busy", strategy="oscars", busy=0.8),
    ours("asp"),
    ours("ssp"),
    ours("dssp"),
    ours("gssp"),
)

CONTENDERS: dict[str, Contender] = {contender.name: contender for contender in _ALL}
