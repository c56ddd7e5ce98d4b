"""A Hugging Face Trainer: accumulation, clipping, evaluations and checkpoints, under DDP or a strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import offbeat.integrations.transformers as integration
from tests.integrations.loops.common import (
    ACCUMULATE,
    BATCH,
    CLIP,
    Points,
    accuracy,
    give_scaler,
    main,
    net,
    report,
    strategy_of,
)


class Model(nn.Module):
    """A net with a loss, as a Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Named(Dataset[dict[str, Tensor]]):
    """The same points, by the names of the model's arguments."""

    def __init__(self) -> None:
        self.points = Points()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.points[index]
        return {"x": x, "labels": y}


class Stop(TrainerCallback):  # type: ignore[misc]
    """The end of a run, some steps after it began."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.at


class Totals(TrainerCallback):  # type: ignore[misc]
    """What the attachment has counted, before it is closed."""

    def __init__(self) -> None:
        self.attachment: Any = None
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.attachment is not None:
            self.steps = self.attachment.sync.metrics.steps


def train(wished: dict[str, Any]) -> None:
    model = Model()
    arguments = TrainingArguments(
        output_dir=f"{wished['out']}/saved",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=400,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=CLIP,
        num_train_epochs=1,
        learning_rate=0.02,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=30,
        logging_strategy="no",
        report_to=[],
        use_cpu=wished["device"] == "cpu",
        ddp_backend="gloo",
        bf16=wished["precision"] == "bf16",
        fp16=wished["precision"] == "fp16",
        seed=3,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    totals = Totals()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Named(),
        eval_dataset=Named(),
        callbacks=[Stop(wished["stop"]), totals],
    )
    give_scaler(trainer.accelerator, wished)
    if wished["how"] != "ddp":
        totals.attachment = integration.attach(trainer, strategy_of(wished))
    trainer.train(resume_from_checkpoint=wished["resume"])
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    scale = trainer.accelerator.scaler.get_scale() if trainer.accelerator.scaler else 1.0
    report(wished, model, accuracy=accuracy(model.net), losses=losses, steps=totals.steps, scale=scale)


if __name__ == "__main__":
    main(train)
