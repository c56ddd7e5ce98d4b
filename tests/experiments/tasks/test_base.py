"""The tasks: their settings, data, models and yardsticks."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import SettingError
from offbeat.experiments.tasks import TASKS, Data, task
from offbeat.experiments.tasks.images import Images
from tests.support.small_data import write_small

BOTH_MNIST = ("mnist", "fashion-mnist")


# --- names and settings


@pytest.mark.parametrize(
    ("name", "model"), [("digits", "cnn"), ("mnist", "lenet5"), ("fashion-mnist", "mlp")]
)
def test_the_first_model_is_the_default(name: str, model: str) -> None:
    assert task(name).model == TASKS[name].models[0] == model


def test_settings_replace_defaults_and_stay() -> None:
    chosen = task("mnist", model="cnn", batch_size=8, epochs=3, lr=1)
    assert (chosen.model, chosen.batch_size, chosen.epochs, chosen.lr) == ("cnn", 8, 3, 1)
    with pytest.raises(FrozenInstanceError):
        chosen.lr = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mnits", {}, f"unknown task 'mnits'; did you mean 'mnist'? Known: {', '.join(TASKS)}"),
        (
            "mnist",
            {"model": "lenet"},
            "mnist has no model 'lenet'; did you mean 'lenet5'? Known: lenet5, mlp, cnn",
        ),
        ("mnist", {"batchsize": 3}, "did you mean 'batch_size'? Known: model, batch_size, epochs, lr"),
        ("digits", {"model": "zzz"}, "digits has no model 'zzz'; known: cnn"),
        ("digits", {"batch_size": 0}, "batch_size=0: a whole number of samples, at least 1"),
        ("digits", {"batch_size": 1.5}, "batch_size=1.5: a whole number of samples, at least 1"),
        ("digits", {"epochs": -1}, "epochs=-1: a whole number of epochs, at least 1"),
        ("digits", {"lr": 0.0}, "lr=0.0: a finite number above 0"),
        ("digits", {"lr": float("nan")}, "lr=nan: a finite number above 0"),
        ("digits", {"lr": float("inf")}, "lr=inf: a finite number above 0"),
        ("digits", {"lr": "fast"}, "lr='fast': a finite number above 0"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        task(name, **settings)
    assert message in str(refusal.value)


# --- mnist and fashion-mnist


@pytest.mark.parametrize("name", list(TASKS))
def test_a_step_happens_on_the_device_of_the_data(name: str, tmp_path: Path) -> None:
    """Nothing is left on the CPU: what mixes devices raises."""
    write_small(tmp_path)
    if name in BOTH_MNIST:
        data: Data = Images(*[(torch.zeros(9, 1, 28, 28), torch.zeros(9, dtype=torch.int64))] * 2)
    else:
        data = task(name).load(tmp_path)
    chosen = task(name)
    model = chosen.build().to("meta")
    batch = data.to("meta").batch(torch.arange(4))
    if name != "quadratic":
        assert {part.device.type for part in batch} == {"meta"}
    loss = chosen.loss(model, batch)
    loss.backward()
    chosen.clip(model)
    assert loss.device.type == "meta"
