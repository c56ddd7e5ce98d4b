"""Lightning: `OffbeatStrategy`, a strategy of Lightning's Trainer with one of Offbeat's inside.

    trainer = L.Trainer(strategy=OffbeatStrategy(offbeat.LocalSGD(period=8)), devices=4)

or one of ours by name, with default settings: `L.Trainer(strategy="offbeat_local_sgd")`. Several optimizers,
manual optimization, accumulation and clipping work as under DDP. Validation and checkpoints show the model
that all ranks share; a checkpoint has each rank's own state, too, and `ckpt_path` goes on from it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from offbeat.attach import Sync, attach
from offbeat.core.strategy import Strategy
from offbeat.errors import OffbeatError
from offbeat.integrations.calls import OptimizerCalls
from offbeat.strategies import STRATEGIES

STATES = "offbeat"  # the key in a checkpoint: each rank's own state


class OffbeatStrategy(DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP without DDP: its processes, devices and samplers, and Offbeat between them."""

    strategy_name = "offbeat"

    def __init__(
        self, method: Strategy[Any], attach_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.sync: Sync | None = None  # while it fits
        self._method = method
        self._attach_options = attach_options or {}
        self._shown = ExitStack()  # in which all ranks hold the same model
        self._is_shown = False

    # --- in the place of DDP

    def configure_ddp(self) -> None:
        """Do nothing: the model stays as it is."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.sync = attach(self.lightning_module, self.optimizers, self._method, **self._attach_options)
            self._calls = OptimizerCalls(self.sync, len(self.optimizers))
            # Before each batch Lightning tells all ranks whether rank 0 was signalled to end, for which all
            # would wait in every step. A rank still ends by its own signal, and the others learn of that.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with self._calls.of(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without traffic."""
        assert self.sync is not None
        with self.sync.no_sync():
            yield

    def on_exception(self, exception: BaseException) -> None:
        self._close(exception)
        super().on_exception(exception)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._close()

    def teardown(self) -> None:
        self._close()
        super().teardown()

    def _close(self, failure: BaseException | None = None) -> None:
        if self.sync is not None:
            sync, self.sync = self.sync, None
            self._hide()
            sync.close(failure)

    # --- looking at the model that all ranks share

    def on_validation_start(self) -> None:
        self._show()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._hide()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.sync is None:
            return dict(super().lightning_module_state_dict())
        shown = self._is_shown
        if not shown:
            self.sync.settle()  # a look does not wait for what is in flight, but a checkpoint is to have it
        self._show()
        state = super().lightning_module_state_dict()
        copied = {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}
        if not shown:
            self._hide()
        return copied

    def _show(self) -> None:
        if self.sync is not None and not self._is_shown:
            self._shown.enter_context(self.sync.consensus())
            self._is_shown = True

    def _hide(self) -> None:
        self._is_shown = False
        self._shown.close()

    # --- checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self.sync is not None and "optimizer_states" in checkpoint:  # not of the weights alone
            self._hide()  # a rank's own state has its own weights
            states = [None] * self.world_size if self.is_global_zero else None
            dist.gather_object(self.sync.state_dict(), states)
            checkpoint[STATES] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        states = checkpoint.get(STATES)
        if self.sync is None:
            return
        if states is None or len(states) != self.world_size:
            found = "no rank's own state" if states is None else f"the states of {len(states)} ranks"
            raise OffbeatError(
                f"the checkpoint has {found}, where {self.world_size} ranks train: load its weights before "
                "training, and give no ckpt_path"
            )
        self.sync.load_state_dict(states[self.global_rank])


for _name, _cls in STRATEGIES.own.items():
    StrategyRegistry.register(f"offbeat_{_name}", OffbeatStrategy, f"Offbeat: {_cls.summary}", method=_cls())
