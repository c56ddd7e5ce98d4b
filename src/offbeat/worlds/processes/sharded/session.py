"""Session of a sharded model: translates between the loop's DTensors and the strategy's local parameters.

The loop computes, clips and steps DTensors; a strategy sees local parameters in the same memory. Whenever
control passes from the loop to the strategy, the local parts of the gradients are taken over, and whenever it
passes back, the loop gets the gradients as the strategy left them.

FSDP2 runs the hooks of a sharded parameter each time that it has reduced the parameter's gradient, that is
once for each use of the module in forward. So the first backward of a model only counts, and its gradients
are gathered when it has ended. In later ones, a gradient is complete at the last of its expected reductions,
and strategies send blocks while backward goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.core.blocks import Block
from offbeat.core.ledger import Ledger
from offbeat.core.port import ServerAdmin
from offbeat.core.replica import Replica
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError
from offbeat.worlds.processes.members import MemberSession
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.sharded.model import LocalModel
from offbeat.worlds.processes.sharded.optimizer import LocalOptimizer


class ShardedSession(MemberSession):
    """A session whose replica holds the local parts of a sharded model."""

    ends_after_others = True  # FSDP2 reduces some gradients in a callback of its own at the end of backward

    def __init__(
        self,
        strategy: Strategy[Any],
        replica: Replica,
        port: ProcessPort,
        ledger: Ledger,
        local: LocalModel,
        optimizers: Sequence[LocalOptimizer],
    ) -> None:
        self._local = local
        self._optimizers = optimizers
        self._expected: Counter[nn.Parameter] = Counter()  # reductions of each gradient in one backward
        self._seen: Counter[nn.Parameter] = Counter()
        local.bind()
        super().__init__(strategy, replica, port, ledger, sharded=True)
        self._frozen = [(n, p) for n, p in local.model.named_parameters() if not p.requires_grad]

    @property
    def model(self) -> nn.Module:
        return self._local.model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [each.optimizer for each in self._optimizers]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param for param in self.model.parameters() if param.requires_grad]

    # --- one step

    async def backward_begins(self, first: nn.Parameter, synchronize: bool = True) -> None:
        self._seen.clear()
        self._local.check_bound()
        self._take()  # the loop clears and scales its own gradients only
        await super().backward_begins(self._local.of(first), synchronize)
        with torch.no_grad():
            self._local.return_gradients()  # hidden ones, if this backward adds to them

    def gradient_ready(self, param: nn.Parameter) -> None:
        self._seen[param] += 1
        if not self._expected or self._buckets is None:
            return
        if self._seen[param] == self._expected[param]:
            self._local.take_gradient(param)
            super().gradient_ready(self._local.of(param))
        elif self._seen[param] > self._expected[param] > 0:
            raise OffbeatError(
                f"the gradient of parameter {self._local.names[param]} was reduced more often than in "
                "earlier backwards, after it had been sent: use every sharded module equally often in each "
                "forward"
            )

    def complete_gradients(self) -> list[Block]:
        for param, _ in self._local.pairs:
            reported = self._buckets is not None and 0 < self._expected[param] <= self._seen[param]
            if not reported:  # else the local parameter has the gradient, gathered into its block
                self._local.take_gradient(param)
        if not self._expected:
            self._expected.update(self._seen)
        self._take_settings()
        return super().complete_gradients()

    async def accumulate(self) -> None:
        self._take()
        await super().accumulate()
        self._return()

    async def begin_step(self) -> None:
        await super().begin_step()
        self._return()

    async def steps_in_backward(self, optimizer: Optimizer) -> None:
        self._take()
        await super().steps_in_backward(self._local_of(optimizer))

    async def before_update(self, optimizer: Optimizer) -> None:
        self._take()
        await super().before_update(self._local_of(optimizer))
        self._return()

    async def after_update(self, optimizer: Optimizer) -> None:
        self._take()
        await super().after_update(self._local_of(optimizer))
        self._return()

    async def forward_begins(self) -> None:
        self._take()
        await super().forward_begins()
        self._return()

    # --- between steps

    async def broadcast(self, root: int = 0) -> None:
        await super().broadcast(root)
        self._local.reshard()

    async def drain(self) -> None:
        self._take()
        await super().drain()
        self._return()

    async def publish(self, alone: bool = False) -> Callable[[], None]:
        self._take()
        restore = await super().publish(alone)
        self._return()

        def restore_parts() -> None:
            restore()
            self._local.reshard()

        return restore_parts

    async def save(self, server: ServerAdmin | None = None) -> dict[str, Any]:
        self._take()
        saved = await super().save(server)
        self._return()
        return saved

    def load(self, saved: dict[str, Any]) -> list[Tensor]:
        self._take()
        server_state = super().load(saved)
        self._return()
        return server_state

    def release(self) -> None:
        super().release()
        self._local.release()

    # --- the border between the loop and the strategy

    def _local_of(self, optimizer: Optimizer) -> Optimizer:
        return next(each.local for each in self._optimizers if each.optimizer is optimizer)

    def _take(self) -> None:
        self._local.take_gradients()
        self._take_settings()

    def _take_settings(self) -> None:
        for optimizer in self._optimizers:
            optimizer.take()

    def _return(self) -> None:
        with torch.no_grad():
            self._local.return_gradients()
        for optimizer in self._optimizers:
            optimizer.give_back()
        self._local.reshard()
