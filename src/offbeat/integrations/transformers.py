"""Transformers: `attach` gives any Hugging Face `Trainer` a strategy, in the place of DDP.

    trainer = Trainer(model, args, train_dataset=…)
    offbeat.integrations.transformers.attach(trainer, offbeat.LocalSGD(period=8))
    trainer.train()

Evaluations and checkpoints show the model that all ranks share; a checkpoint has each rank's own state, too,
and `resume_from_checkpoint` goes on from it. After `train()` all ranks hold the same model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from offbeat.attach import Sync
from offbeat.attach import attach as attach_model
from offbeat.core.strategy import Strategy
from offbeat.integrations.accelerate import check_accelerator, keep_traffic_out
from offbeat.integrations.rank_state import load_rank_state, save_rank_state

log = logging.getLogger("offbeat")


def attach(trainer: Trainer, strategy: Strategy[Any], **options: Any) -> Attachment:
    """Attach a strategy to all that `trainer.train()` trains; the options are those of `offbeat.attach`."""
    check_accelerator(trainer.accelerator)
    attachment = Attachment(trainer, strategy, options)
    trainer.add_callback(attachment)
    return attachment


def warn_of_waits(arguments: TrainingArguments, strategy: Strategy[Any]) -> None:
    """Warn if the Trainer lets all ranks wait for each other in every step, where the strategy does not."""
    if arguments.average_tokens_across_devices and not strategy.identical_replicas:
        log.warning(
            "average_tokens_across_devices=True, the Trainer's default, lets all ranks wait for the slowest "
            "in every step of a model that is given num_items_in_batch, as most language models are; under "
            "%s they would not have to. Set average_tokens_across_devices=False in TrainingArguments: each "
            "rank then divides its loss by its own tokens",
            strategy.name,
        )


class Attachment(TrainerCallback):  # type: ignore[misc]
    """A strategy's part in a Trainer: attached when training begins, closed when it ends."""

    def __init__(self, trainer: Trainer, strategy: Strategy[Any], options: dict[str, Any]) -> None:
        self.sync: Sync | None = None  # while it trains
        self._trainer = trainer
        self._strategy = strategy
        self._options = options
        self._checkpoint: str | None = None  # to resume from
        self._showing = False
        accelerator = trainer.accelerator
        self._no_sync = accelerator.no_sync
        prepare_model = accelerator.prepare_model
        accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        self._wrap("evaluate", self._show)
        self._wrap("predict", self._show)
        self._wrap("_save_checkpoint", self._save)
        self._wrap("_load_optimizer_and_scheduler", self._note_checkpoint)
        self._wrap("_load_best_model", self._close_before)
        self._wrap("_inner_training_loop", self._train)

    # --- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        self.sync = attach_model(trainer.model, trainer.optimizer, self._strategy, **self._options)
        trainer.accelerator.no_sync = self._no_sync
        keep_traffic_out(trainer.accelerator, trainer.model_wrapped, self.sync)
        if args.world_size > 1:
            warn_of_waits(args, self._strategy)
        if self._checkpoint is not None:
            load_rank_state(self.sync, self._checkpoint)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.sync is not None:
            self.sync.end_step()  # a GradScaler may have skipped it, and the Trainer exchanges losses

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    # --- around the Trainer's methods

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        method = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args, **kwargs: around(method, *args, **kwargs))

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Close after a failure, too, so that the other ranks learn the reason."""
        try:
            return train(*args, **kwargs)
        except BaseException as failed:
            self._close(failed)
            raise
        finally:
            self._checkpoint = None

    def _show(self, look: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Look at the model that all ranks share."""
        if self.sync is None or self._showing:
            return look(*args, **kwargs)
        self._showing = True
        try:
            with self.sync.consensus():
                return look(*args, **kwargs)
        finally:
            self._showing = False

    def _save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.sync is not None:
            self.sync.settle()  # a look does not wait for what is in flight, but a checkpoint is to have it
        self._show(save, *args, **kwargs)
        if self.sync is not None:
            trainer = self._trainer
            run = Path(trainer._get_output_dir(trial=args[1] if len(args) > 1 else kwargs.get("trial")))
            save_rank_state(self.sync, run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")

    def _note_checkpoint(self, load: Callable[..., Any], checkpoint: str | None) -> None:
        self._checkpoint = checkpoint
        load(checkpoint)

    def _close_before(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._close()  # a server's weights must not replace the best ones
        return load(*args, **kwargs)

    def _close(self, failure: BaseException | None = None) -> None:
        if self.sync is not None:
            sync, self.sync = self.sync, None
            sync.close(failure)
            self._trainer.accelerator.no_sync = self._no_sync
