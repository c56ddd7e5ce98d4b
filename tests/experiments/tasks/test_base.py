"""The tasks: their settings, data, models and yardsticks."""

import gzip
import struct
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.errors import DataError, SettingError
from offbeat.experiments.tasks import TASKS, Data, task
from offbeat.experiments.tasks.images import Images, ImageTask
from offbeat.experiments.tasks.mnist import FILES
from tests.support.small_data import write_small

BOTH_MNIST = ("mnist", "fashion-mnist")


@pytest.fixture
def write_idx(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a tiny data set of 4 + 2 images: image i has the label i, and all its pixels are 10 × i."""
    monkeypatch.delenv("OFFBEAT_DATA", raising=False)

    def write(folder: Path, packed: bool = True, only: tuple[str, ...] = FILES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in only:
            count = 4 if file.startswith("train") else 2
            if "images" in file:
                content = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
                content += b"".join(bytes([10 * i]) * 784 for i in range(count))
            else:
                content = struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(range(count))
            (folder / (file + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)

    return write


def accuracy_after_training(chosen: ImageTask, data: Images, seed: int, workers: int = 4) -> float:
    """One process that takes the steps which synchronous workers would take together."""
    torch.manual_seed(seed)
    model = chosen.build()
    optimizer = chosen.optimizer(model)
    together = workers * chosen.batch_size
    for _ in range(chosen.epochs):
        order = torch.randperm(len(data))
        for start in range(0, len(data) - together + 1, together):
            optimizer.zero_grad()
            chosen.loss(model, data.batch(order[start : start + together])).backward()
            optimizer.step()
    return chosen.evaluate(model, data)


# --- names and settings


def test_each_task_is_listed_under_its_name_with_a_line_about_it() -> None:
    assert {"digits", "mnist", "fashion-mnist"} <= set(TASKS)
    for name, kind in TASKS.items():
        assert kind.name == name
        assert kind.summary and "\n" not in kind.summary


@pytest.mark.parametrize("name", ["digits", *BOTH_MNIST])
def test_image_tasks_are_measured_by_accuracy_and_can_build_each_model(name: str) -> None:
    kind = TASKS[name]
    assert (kind.metric, kind.higher_is_better) == ("accuracy", True)
    assert issubclass(kind, ImageTask) and set(kind.models) == set(kind.builders)


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


# --- models, loss and yardstick


@pytest.mark.parametrize(
    ("name", "model", "parameters"),
    [
        ("digits", "cnn", (9 + 1) * 32 + (32 * 9 + 1) * 32 + (512 + 1) * 64 + (64 + 1) * 10),
        ("mnist", "mlp", 669_706),
        ("mnist", "cnn", 1_199_882),
        # LeCun et al. 1998 (C1, C3, C5, F6, output), but C3 sees all six maps, and the output layer is dense
        (
            "mnist",
            "lenet5",
            (25 + 1) * 6 + (6 * 25 + 1) * 16 + (400 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10,
        ),
    ],
)
def test_models_have_their_size_and_follow_the_seed(name: str, model: str, parameters: int) -> None:
    chosen = task(name, model=model)
    torch.manual_seed(5)
    first, second = chosen.build(), chosen.build()
    torch.manual_seed(5)
    again = chosen.build()
    weights = [nn.utils.parameters_to_vector(built.parameters()) for built in (first, second, again)]
    assert weights[0].numel() == parameters
    assert torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[1])
    side = 8 if name == "digits" else 28
    assert first(torch.zeros(3, 1, side, side)).shape == (3, 10)


def test_the_optimizer_is_sgd_with_momentum_at_the_rate_of_the_task() -> None:
    chosen = task("digits", lr=0.25)
    optimizer = chosen.optimizer(chosen.build())
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.25, 0.9)


def test_the_loss_is_the_mean_over_the_batch() -> None:
    chosen = task("digits")
    model, (inputs, targets) = chosen.build(), chosen.load().batch(torch.arange(6))
    each = [chosen.loss(model, (inputs[i : i + 1], targets[i : i + 1])) for i in range(6)]
    torch.testing.assert_close(chosen.loss(model, (inputs, targets)), torch.stack(each).mean())


class Guess(nn.Module):
    """Says the class that its input holds, and notes in which mode it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Identity()
        self.modes: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.modes.append(self.training or self.frozen.training)
        return nn.functional.one_hot(inputs.long(), 10).float()


def test_evaluation_counts_hits_over_the_whole_test_split() -> None:
    said, truth = torch.arange(2500) % 10, torch.arange(2500) % 10
    said[2200:] = (said[2200:] + 1) % 10
    data = Images((said, truth), (said, truth))
    assert task("digits").evaluate(Guess(), data) == 2200 / 2500


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_mode_of_every_module(training: bool) -> None:
    labels = torch.arange(10)
    model = Guess().train(training)
    model.frozen.eval()
    task("digits").evaluate(model, Images((labels, labels), (labels, labels)))
    assert model.modes == [False]
    assert (model.training, model.frozen.training) == (training, False)


# --- digits


def test_digits_are_split_evenly_and_always_alike() -> None:
    data, again = task("digits").load(), task("digits").load()
    assert isinstance(data, Images) and isinstance(again, Images)
    (inputs, targets), (test_inputs, test_targets) = data.train, data.test
    assert len(data) == 1437 and inputs.shape == (1437, 1, 8, 8) and test_inputs.shape == (360, 1, 8, 8)
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert (float(inputs.min()), float(inputs.max())) == (-1.0, 1.0)
    assert test_targets.bincount().tolist() == [36] * 10
    assert (targets.bincount() + 36).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.labels is targets
    for one, other in zip((*data.train, *data.test), (*again.train, *again.test), strict=True):
        assert torch.equal(one, other)
    # pinned, so that no later version moves an image from one side to the other unseen
    assert [int((part + 1).mul(8).sum()) for part in (inputs, test_inputs)] == [449_432, 112_286]


def test_a_batch_holds_the_samples_asked_for() -> None:
    data = task("digits").load()
    assert isinstance(data, Images)
    inputs, targets = data.batch(torch.tensor([7, 3, 7]))
    assert torch.equal(inputs, data.train[0][[7, 3, 7]]) and torch.equal(targets, data.train[1][[7, 3, 7]])


def test_all_tensors_move_to_the_device() -> None:
    moved = task("digits").load().to("meta")
    assert isinstance(moved, Images) and len(moved) == 1437
    assert {part.device.type for part in (*moved.train, *moved.test)} == {"meta"}
    assert {part.device.type for part in moved.batch(torch.arange(4))} == {"meta"}


@pytest.mark.usefixtures("one_thread")  # several fight for the cores of a busy machine, and get nowhere
def test_digits_train_to_97_percent() -> None:
    digits = task("digits")
    data = digits.load()
    assert isinstance(digits, ImageTask) and isinstance(data, Images)
    assert accuracy_after_training(digits, data, seed=1) >= 0.97


# --- mnist and fashion-mnist


@pytest.mark.parametrize("name", BOTH_MNIST)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("by_variable", [True, False])
def test_files_are_found_in_every_place_that_is_promised(
    name: str,
    packed: bool,
    inside: bool,
    by_variable: bool,
    tmp_path: Path,
    write_idx: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_idx(tmp_path / name if inside else tmp_path, packed)
    if by_variable:
        monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    data = task(name).load(None if by_variable else tmp_path)
    assert isinstance(data, Images)
    assert data.train[0].shape == (4, 1, 28, 28) and data.test[0].shape == (2, 1, 28, 28)
    assert data.train[0].is_contiguous() and data.train[0].dtype == torch.float32
    assert data.labels.dtype == torch.int64 and data.labels.tolist() == [0, 1, 2, 3]
    mean, deviation = (0.1307, 0.3081) if name == "mnist" else (0.2860, 0.3530)
    expected = (torch.tensor([0.0, 10, 20, 30]) / 255 - mean) / deviation
    torch.testing.assert_close(data.train[0][:, 0, 9, 9], expected)


def test_the_folder_given_goes_before_the_variable(
    tmp_path: Path, write_idx: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_idx(tmp_path)
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "nowhere"))
    assert len(task("mnist").load(tmp_path)) == 4


@pytest.mark.parametrize(
    ("name", "publisher"),
    [("mnist", "LeCun"), ("fashion-mnist", "zalandoresearch/fashion-mnist"), ("fashion-mnist", "Debian")],
)
@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        (None, "no data folder is given"),
        ("nowhere", "there is no folder"),
        ("", "none of its files is in"),
    ],
)
def test_missing_data_says_what_to_fetch_and_what_to_type(
    name: str,
    publisher: str,
    folder: str | None,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", "")
    with pytest.raises(DataError) as refusal:
        task(name).load(None if folder is None else tmp_path / folder)
    for part in (problem, publisher, f"DIR/{name}", *FILES, "DIR as the data folder", "OFFBEAT_DATA=DIR"):
        assert part in str(refusal.value)


def test_files_that_lack_are_named(tmp_path: Path, write_idx: Callable[..., None]) -> None:
    write_idx(tmp_path / "mnist", only=FILES[:2])
    with pytest.raises(DataError, match=f"{tmp_path / 'mnist'} lacks {FILES[2]}, {FILES[3]}"):
        task("mnist").load(tmp_path)


@pytest.mark.parametrize("name", BOTH_MNIST)
def test_the_real_files_hold_what_is_published(name: str, data_folder: Path) -> None:
    data = task(name).load(data_folder)
    assert isinstance(data, Images)
    assert data.train[0].shape == (60_000, 1, 28, 28) and data.test[0].shape == (10_000, 1, 28, 28)
    assert data.labels.unique().tolist() == data.test[1].unique().tolist() == list(range(10))
    assert abs(float(data.train[0].mean())) < 1e-3 and abs(float(data.train[0].std()) - 1) < 1e-3


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
