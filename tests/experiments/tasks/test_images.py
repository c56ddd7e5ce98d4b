"""Image tasks: batches, loss, optimizer and accuracy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offbeat.experiments.tasks import TASKS, task
from offbeat.experiments.tasks.images import Images, ImageTask

BOTH_MNIST = ("mnist", "fashion-mnist")


@pytest.mark.parametrize("name", ["digits", *BOTH_MNIST])
def test_image_tasks_are_measured_by_accuracy_and_can_build_each_model(name: str) -> None:
    kind = TASKS[name]
    assert (kind.metric, kind.higher_is_better) == ("accuracy", True)
    assert issubclass(kind, ImageTask) and set(kind.models) == set(kind.builders)


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
