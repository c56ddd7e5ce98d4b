"""A loop as Accelerate's users write it, with accumulation and clipping, under DDP or a strategy."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offbeat.integrations.accelerate import prepare
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


def accelerator_of(wished: dict[str, Any]) -> Accelerator:
    AcceleratorState._reset_state()  # it keeps the precision of the last loop
    return Accelerator(
        cpu=wished["device"] == "cpu",
        gradient_accumulation_steps=ACCUMULATE,
        mixed_precision=wished["precision"],
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def train_two(wished: dict[str, Any]) -> None:
    """Train two models that one accelerator has prepared, save them, train on, and load them again."""
    accelerator = accelerator_of(wished)
    folder = f"{wished['out']}/saved"
    models = [net() for _ in range(2)]
    prepared = [
        prepare(
            accelerator,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1 + number),
            DataLoader(Points(), BATCH),
            strategy=strategy_of(wished),
        )
        for number, model in enumerate(models)
    ]

    def train_both() -> list[Tensor]:
        for model, optimizer, loader, _ in prepared:
            for x, y in islice(loader, 3):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return [model[0].weight.detach().clone() for model in models]

    saved = train_both()
    accelerator.save_state(folder)
    later = train_both()
    accelerator.load_state(folder)
    loaded = [model[0].weight.detach().clone() for model in models]
    for *_, sync in prepared:
        sync.close()
    accelerator.save_state(f"{folder} when closed")
    report(wished, models[0], saved=saved, later=later, loaded=loaded)


def train(wished: dict[str, Any]) -> None:
    if wished.get("models") == 2:
        train_two(wished)
        return
    accelerator = accelerator_of(wished)
    give_scaler(accelerator, wished)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    loader = DataLoader(Points(), BATCH)
    sync = None
    if wished["how"] == "ddp":
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    else:
        model, optimizer, loader, scheduler, sync = prepare(
            accelerator, model, optimizer, loader, scheduler, strategy=strategy_of(wished)
        )
    done = 0
    if wished["resume"]:
        accelerator.load_state(wished["resume"])
        done = wished["done"]
        loader = accelerator.skip_first_batches(loader, done)
    for number, (x, y) in enumerate(loader, done + 1):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == wished["stop"]:
            accelerator.save_state(f"{wished['out']}/saved")
            break
    sent = sync.metrics.bytes_sent if sync else 0
    steps = sync.metrics.steps if sync else 0
    if sync:
        sync.close()
    scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0
    trained = accelerator.unwrap_model(model)
    report(wished, trained, accuracy=accuracy(model), sent=sent, steps=steps, scale=scale)


if __name__ == "__main__":
    main(train)
