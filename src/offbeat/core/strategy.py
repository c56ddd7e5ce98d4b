"""Strategy: what a worker exchanges with the others, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from torch import nn

from offbeat.codecs import Codec
from offbeat.core.blocks import Block, block_sizes
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.errors import SettingError

if TYPE_CHECKING:
    from offbeat.server.half import ServerHalf

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC, Generic[S]):
    """A method of semi-synchronous training.

    Subclasses are frozen, keyword-only dataclasses whose fields are the settings. What changes from step
    to step is the state `S`, made by `init`, handed in at each call, and saved in checkpoints: a dataclass
    of tensors, numbers, and what is still in flight.

    All methods run under `torch.no_grad()`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    identical_replicas: ClassVar[bool] = False
    """Between steps every worker holds the very same weights, so evaluation need not average them."""

    no_codec: ClassVar[str] = "nothing of what it exchanges may be lost"
    """Why this strategy takes no codec; empty if it does."""

    codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.codec is not None:
            if not isinstance(self.codec, Codec):
                raise SettingError(
                    f"codec={self.codec!r}: a codec, such as ErrorFeedback(TopK(0.01)), or None"
                )
            if self.no_codec:
                raise SettingError(f"codec={self.codec}: {self.name} takes none: {self.no_codec}")

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

    def server_half(self) -> ServerHalf | None:
        """Return the parameter server's part. None: this strategy uses collectives only."""
        return None

    def with_epoch(self, steps: int) -> Self:
        """The same strategy, told how many steps an epoch has; most need not know."""
        return self

    def planned(self, state: S) -> int:
        """The local steps from one exchange to the next, where somebody plans them. 0: nobody does."""
        return 0

    def wants_loss(self) -> bool:
        """Whether it must be told the loss of each step."""
        return False

    def settings(self) -> dict[str, Any]:
        """Plain data, from which the strategy can be built again."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(value) if hasattr(value, "from_text") else value for name, value in values.items()}

    def grain(self, nbytes: int) -> tuple[int, int]:
        """How large the first block and the others should be, in bytes, of a model of `nbytes`."""
        return block_sizes(nbytes)

    def apart(self, model: nn.Module) -> Collection[nn.Parameter]:
        """Parameters that must not share a block with others."""
        return frozenset()

    def wants_blocks(self) -> bool:
        """Whether gradients must be laid out in blocks as backward makes them."""
        return type(self).ready is not Strategy.ready
