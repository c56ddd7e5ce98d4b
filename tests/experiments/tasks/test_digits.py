"""The digits task: a split that never changes, and a model that learns it."""

from __future__ import annotations

import torch

from offbeat.experiments.tasks import task
from offbeat.experiments.tasks.images import Images, ImageTask


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


def test_digits_train_to_97_percent() -> None:
    digits = task("digits")
    data = digits.load()
    assert isinstance(digits, ImageTask) and isinstance(data, Images)
    assert accuracy_after_training(digits, data, seed=1) >= 0.97
