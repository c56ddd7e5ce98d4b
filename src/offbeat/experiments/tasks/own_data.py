"""Training samples as users have them: tensors of one length, or a data set with a length and an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from offbeat.core.fields import Field
from offbeat.experiments.tasks.base import Batch, Data

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class SamplesField(Field):
    """Samples to train on; stored as a data set."""

    @property
    def expected(self) -> str:
        return (
            "tensors of one length, such as (inputs, targets), or a data set with a length above 0 and an "
            "index (of a DataLoader, give its dataset)"
        )

    def read(self, value: Any) -> Any:
        if isinstance(value, tuple) and value and all(isinstance(each, Tensor) for each in value):
            if any(each.dim() == 0 or len(each) != len(value[0]) for each in value):
                raise self.refuse([tuple(each.shape) for each in value])
            value = TensorDataset(*value)
        indexed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        if not indexed or isinstance(value, IterableDataset | str | Tensor | dict) or not len(value):
            raise self.refuse(value)
        return value


class OwnData(Data):
    """Samples of a user's data set, in batches as `collate` makes them. They are the test split, too."""

    def __init__(
        self, samples: Any, collate: Collate | None, batch_size: int, device: torch.device | str = "cpu"
    ) -> None:
        # Rows of tensors are selected at once: sample by sample takes a hundred times as long.
        self._tensors = samples.tensors if type(samples) is TensorDataset and collate is None else None
        self._samples = samples
        self._collate = collate
        self._batch_size = batch_size
        self._device = device

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Tensor) -> Batch:
        if self._tensors is not None:
            return tuple(tensor[indices].to(self._device) for tensor in self._tensors)
        samples = [self._samples[index] for index in indices.tolist()]
        batch: Batch = tree_map(self._move, (self._collate or default_collate)(samples))
        return batch

    def test_batches(self) -> Iterator[Batch]:
        for part in torch.arange(len(self)).split(self._batch_size):
            yield self.batch(part)

    def to(self, device: torch.device | str) -> Self:
        samples = self._samples
        if self._tensors is not None:  # once, not batch by batch
            samples = TensorDataset(*(tensor.to(device) for tensor in self._tensors))
        return type(self)(samples, self._collate, self._batch_size, device)

    @property
    def labels(self) -> Tensor | None:
        """The last of several tensors, or the `targets` of a data set, if these are whole numbers."""
        several = self._tensors if self._tensors and len(self._tensors) > 1 else None
        known = several[-1] if several else getattr(self._samples, "targets", None)
        if isinstance(known, list):
            known = torch.as_tensor(known)
        is_class = isinstance(known, Tensor) and known.dim() == 1 and known.dtype == torch.int64
        return known if is_class else None

    def _move(self, leaf: Any) -> Any:
        return leaf.to(self._device) if hasattr(leaf, "to") else leaf
