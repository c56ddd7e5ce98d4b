"""Lightning's Trainer, with accumulation, clipping, validation and checkpoints, under DDP or a strategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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
    strategy_of,
)


class Module(L.LightningModule):
    """The net; with `manual`, two optimizers that it steps by itself."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.net = net()
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        sync = getattr(self.trainer.strategy, "sync", None)
        self.steps = sync.metrics.steps if sync else 0

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.losses.append(float(nn.functional.cross_entropy(self.net(batch[0]), batch[1])))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return [
            torch.optim.SGD(self.net[:3].parameters(), lr=0.1),
            torch.optim.Adam(self.net[3].parameters(), lr=0.01),
        ]


def train(wished: dict[str, Any]) -> None:
    manual = wished.get("manual", False)
    module = Module(manual)
    strategy = "ddp" if wished["how"] == "ddp" else OffbeatStrategy(strategy_of(wished))
    if wished.get("by_name"):
        strategy = f"offbeat_{wished['how']}"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
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
    trainer.fit(module, DataLoader(Points(), BATCH), DataLoader(Points(), 400), ckpt_path=wished["resume"])
    report(wished, module.net, accuracy=accuracy(module.net), losses=module.losses, steps=module.steps)


if __name__ == "__main__":
    main(train)
