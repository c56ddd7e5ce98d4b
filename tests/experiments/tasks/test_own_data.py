"""Users' samples as batches: tensors, data sets, collate functions, devices and classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from offbeat.core.fields import FieldError
from offbeat.experiments.tasks.base import count_samples
from offbeat.experiments.tasks.own_data import OwnData, SamplesField

INPUTS, TARGETS = torch.arange(10.0).reshape(5, 2), torch.tensor([0, 1, 0, 1, 2])
BOTH = (INPUTS, TARGETS)
CHOSEN = torch.tensor([3, 1])


def read(data: Any, collate: Any = None) -> OwnData:
    return OwnData(SamplesField().read(data), collate, 2)


@pytest.mark.parametrize(
    "data",
    [BOTH, TensorDataset(*BOTH), Subset(TensorDataset(*BOTH), range(5)), list(zip(*BOTH, strict=True))],
    ids=["tensors", "tensor data set", "data set", "list of samples"],
)
def test_samples_of_any_form_make_the_same_batches(data: Any) -> None:
    own = read(data)
    assert len(own) == 5
    inputs, targets = own.batch(CHOSEN)
    assert torch.equal(inputs, INPUTS[CHOSEN]) and torch.equal(targets, TARGETS[CHOSEN])
    assert count_samples(own.batch(CHOSEN)) == 2
    assert [count_samples(batch) for batch in own.test_batches()] == [2, 2, 1]
    assert torch.equal(torch.cat([batch[1] for batch in own.test_batches()]), TARGETS)


@pytest.mark.parametrize("collate", [None, lambda samples: {"all": [torch.stack([s[0] for s in samples])]}])
def test_batches_are_on_the_device_of_the_data(collate: Any) -> None:
    batch: Any = read(BOTH, collate).to("meta").batch(CHOSEN)
    first = batch[0] if collate is None else batch["all"][0]
    assert first.device.type == "meta" and first.shape == (2, 2)
    assert count_samples(batch) == 2


def test_tensors_are_moved_once() -> None:
    labels = read(BOTH).to("meta").labels
    assert labels is not None and labels.is_meta


def test_classes_are_known_where_targets_are_whole_numbers() -> None:
    listed = Subset(TensorDataset(*BOTH), range(5))
    assert read(listed).labels is None
    listed.targets = TARGETS.tolist()  # type: ignore[attr-defined]  # as torchvision has them
    for data in (BOTH, listed):
        labels = read(data).labels
        assert labels is not None and torch.equal(labels, TARGETS)
    assert read((INPUTS, INPUTS)).labels is None
    assert read((TARGETS,)).labels is None, "a single tensor has no targets"


@pytest.mark.parametrize(
    "data", [None, 3, "text", {"x": INPUTS}, INPUTS, (), torch.tensor(1), (INPUTS, TARGETS[:4])]
)
def test_what_are_no_samples_is_refused(data: Any) -> None:
    with pytest.raises(FieldError, match="tensors of one length, such as"):
        SamplesField().read(data)
