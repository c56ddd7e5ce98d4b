"""Strategy: what a worker exchanges with the others, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from offbeat.core.blocks import Block, Layout
from offbeat.core.port import Port
from offbeat.core.replica import Replica
from offbeat.core.settings import Settings

if TYPE_CHECKING:
    from offbeat.server.half import ServerHalf

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class Strategy(Settings, ABC, Generic[S]):
    """A method of semi-synchronous training: frozen settings here, changing state in `S`.

    Subclasses are frozen, keyword-only dataclasses whose fields are the settings, each with its kind in the
    annotation (`core/fields.py`). The state is made by `init`, passed to each call and saved in checkpoints:
    a dataclass of tensors, numbers and results that are still in flight.

    All methods run under `torch.no_grad()`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    identical_replicas: ClassVar[bool] = False
    """Every worker holds the same weights between steps: checkpoints and evaluation need not average."""

    def layout(self, model: nn.Module) -> Layout:
        """Return how the model is to be cut into blocks, and whether `ready` is to be called for them."""
        alone = self.server_half() is None
        return Layout.default(model, keeps_loaded=alone, keeps_edits=alone)

    @abstractmethod
    def init(self, replica: Replica) -> S:
        """Create the state before the first step."""

    def ready(self, state: S, replica: Replica, block: Block, port: Port) -> None:
        """Act on a block whose gradient is complete, during backward; in the same order on all workers.

        Only called if `layout(model).gradients`.
        """

    @abstractmethod
    async def step(self, state: S, replica: Replica, port: Port) -> None:
        """Run one step, starting when backward has ended. `await replica.update()` is the optimizer's step.

        Before that, a step may await `replica.about_to_update()`, for gradients as the optimizer sees them.
        What comes before the first of these two must be repeatable: where a loop accumulates gradients, the
        step is abandoned there and begins anew after the next backward. So count steps afterwards.
        """

    async def drain(self, state: S, replica: Replica, port: Port) -> None:
        """Wait for everything in flight."""

    async def publish(self, state: S, replica: Replica, port: Port) -> list[Tensor]:
        """Return the weights to evaluate or save, like `replica.weights`, the same on all workers.

        Do not wait for what is in flight: evaluating must not cost time. Copy all that belongs to this moment
        before the first await, because training may go on meanwhile. Where a server has the weights, only
        worker 0 is asked.
        """
        if self.identical_replicas:
            return replica.weights
        copies = [weight.clone() for weight in replica.weights]
        return [await pending for pending in [port.all_reduce(copy) for copy in copies]]

    def check_elastic(self, minimum: int) -> None:
        """Raise a SettingError if the strategy cannot live through the loss of a worker, with the reason.

        At least `minimum` workers are always left.
        """

    async def on_roster_change(self, state: S, replica: Replica, port: Port, newcomer: bool) -> None:
        """Adapt the state to a changed roster, between two steps; all workers of the roster call this.

        The operations in flight when a worker was lost have been redone with those who are left. On a
        `newcomer` the state is a copy of another worker's, with nothing in flight.
        """

    def server_half(self) -> ServerHalf | None:
        """Return the parameter server's half of the strategy; None if it uses collectives only."""
        return None
