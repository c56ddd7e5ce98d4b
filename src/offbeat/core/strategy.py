"""Strategy: what a worker exchanges with the others, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import nn

from offbeat.codecs import Codec
from offbeat.core.blocks import Block, block_sizes
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.settings import Settings
from offbeat.server.apply import MakeApply
from offbeat.server.rule import Rule
from offbeat.server.server import ParameterServer, ShardState

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Strategy(Settings, ABC, Generic[S]):
    """A method of semi-synchronous training.

    Subclasses are frozen, keyword-only dataclasses whose fields are the settings, each with its kind in the
    annotation (`core/fields.py`). What changes from step
    to step is the state `S`, made by `init`, handed in at each call, and saved in checkpoints: a dataclass
    of tensors, numbers, and what is still in flight.

    All methods run under `torch.no_grad()`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    identical_replicas: ClassVar[bool] = False
    """Between steps every worker holds the very same weights, so evaluation need not average them."""

    refused: ClassVar[Mapping[str, str]] = {"codec": "nothing of what it exchanges may be lost"}

    @abstractmethod
    def init(self, replica: Replica) -> S:
        """The state before the first step."""

    def ready(self, state: S, replica: Replica, block: Block, port: Port) -> None:
        """A block's gradient is complete, inside backward. Blocks come in the same order on all workers."""

    @abstractmethod
    async def step(self, state: S, replica: Replica, port: Port) -> None:
        """One step, from the end of backward on. `await replica.update()` is the optimizer's step.

        Before it, a step may await `replica.about_to_update()`, for gradients as the optimizer sees them.
        """

    async def drain(self, state: S, replica: Replica, port: Port) -> None:
        """Bring in what is under way. Afterwards nothing is in flight."""

    async def publish(self, state: S, replica: Replica, port: Port) -> None:
        """Write into the replica the weights to evaluate and to publish: the same on all workers."""
        if not self.identical_replicas:
            await replica.average(port)

    def rule(self) -> Rule[Any] | None:
        """The server's half. None: this strategy needs no parameter server."""
        return None

    def server(self, memory: ShardState, folding: MakeApply) -> ParameterServer[Any]:
        """A shard of the server, with these weights."""
        rule = self.rule()
        assert rule is not None
        return ParameterServer(memory, rule, folding(memory.weights))

    @property
    def forms(self) -> Sequence[Codec]:
        """Codecs in which a push may travel, counted from 1; in form 0 it does so as it is."""
        return ()

    @property
    def answered_in(self) -> Codec | None:
        """The codec in which a server answers workers that go on. None: with its weights as they are."""
        return None

    def with_epoch(self, steps: int) -> Self:
        """The same strategy, told how many steps an epoch has; most need not know."""
        return self

    @property
    def server_steps(self) -> bool:
        """Whether the server has the optimizer: workers push gradients to it."""
        return False

    def planned(self, state: S) -> int:
        """The local steps from one exchange to the next, where somebody plans them. 0: nobody does."""
        return 0

    def wants_loss(self) -> bool:
        """Whether it must be told the loss of each step."""
        return False

    def grain(self, nbytes: int) -> tuple[int, int]:
        """How large the first block and the others should be, in bytes, of a model of `nbytes`."""
        return block_sizes(nbytes)

    def apart(self, model: nn.Module) -> Collection[nn.Parameter]:
        """Parameters that must not share a block with others."""
        return frozenset()

    def wants_blocks(self) -> bool:
        """Whether gradients must be laid out in blocks as backward makes them."""
        return type(self).ready is not Strategy.ready
