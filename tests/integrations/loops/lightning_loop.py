"""Lightning's Trainer, with accumulation, clipping, validation and checkpoints, under DDP or a strategy."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.transformer import LightningTransformer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offbeat.integrations.lightning import OffbeatStrategy
from tests.integrations.loops.common import (
    ACCUMULATE,
    BATCH,
    CLIP,
    Points,
    accuracy,
    main,
    net,
    report,
    scaler_of,
    strategy_of,
)
from tests.support.limits import HANG_S

PRECISIONS = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Module(L.LightningModule):
    """The net; with `manual`, two optimizers that it steps by itself.

    With `apart`, rank 0 does not go on from its fourth batch before rank 1 has come to its eighth.
    """

    def __init__(self, manual: bool, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart
        self.net = net()
        self.automatic_optimization = not manual
        self.shown: list[Tensor] = []  # the first weights, whenever it is validated
        self.steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
        if self.apart:
            self._drift_apart(number)
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def _drift_apart(self, number: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if self.global_rank == 1 and number == 7:
            store.set("rank 1 is ahead", "")
        if self.global_rank == 0 and number == 3:
            store.wait(["rank 1 is ahead"], timedelta(seconds=HANG_S))

    def on_train_batch_end(self, *_: Any) -> None:
        sync = getattr(self.trainer.strategy, "sync", None)
        self.steps = sync.metrics.steps if sync else 0

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.shown.append(self.net[0].weight.detach().cpu().clone())

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return [
            torch.optim.SGD(self.net[:3].parameters(), lr=0.1),
            torch.optim.Adam(self.net[3].parameters(), lr=0.01),
        ]


def train_demo(wished: dict[str, Any]) -> None:
    """Train Lightning's own demo, a Transformer with dropout, on a text that is where it looks for one."""
    rank = int(os.environ["RANK"])
    words = [f"w{number * number % 61}" for number in range(800)]
    place = Path(wished["out"]) / f"text-{rank}"
    (place / "data").mkdir(parents=True)
    (place / "data" / "wikitext-2.txt").write_text(
        "\n".join(" ".join(words[i : i + 20]) for i in range(0, 800, 20))
    )
    os.chdir(place)
    torch.manual_seed(0)
    module = LightningTransformer(vocab_size=len(set(words)) + 1)
    torch.manual_seed(1 + rank)  # of dropout
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_for(wished),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    report(wished, module.model, steps=trainer.global_step)


def strategy_for(wished: dict[str, Any]) -> Any:
    if wished["how"] == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if wished.get("by_name"):
        return f"offbeat_{wished['how']}"
    return OffbeatStrategy(strategy_of(wished), process_group_backend="gloo")


def train(wished: dict[str, Any]) -> None:
    if wished.get("demo"):
        train_demo(wished)
        return
    manual = wished.get("manual", False)
    module = Module(manual, wished.get("apart", False))
    one_gpu = {"accelerator": "gpu", "devices": 1, "num_nodes": 2}  # as common.share_one_gpu has it
    trainer = L.Trainer(
        **(one_gpu if wished["device"] == "cuda" else {"accelerator": "cpu", "devices": 2}),
        strategy=strategy_for(wished),
        precision=PRECISIONS[wished["precision"]],
        max_epochs=wished.get("epochs", 1),
        accumulate_grad_batches=1 if manual else ACCUMULATE,
        gradient_clip_val=None if manual else CLIP,
        val_check_interval=20,
        callbacks=[
            ModelCheckpoint(f"{wished['out']}/saved", filename="{epoch}", save_on_train_epoch_end=True)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if wished["precision"] == "fp16":
        trainer.precision_plugin.precision = "16-mixed"  # on CPUs Lightning has made it bfloat16
        trainer.precision_plugin.scaler = scaler_of(wished)
    trainer.fit(module, DataLoader(Points(), BATCH), DataLoader(Points(), 400), ckpt_path=wished["resume"])
    scale = trainer.precision_plugin.scaler.get_scale() if wished["precision"] == "fp16" else 1.0
    found = accuracy(module.net)
    report(wished, module.net, accuracy=found, shown=module.shown, steps=module.steps, scale=scale)


if __name__ == "__main__":
    main(train)
