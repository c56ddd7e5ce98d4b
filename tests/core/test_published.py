"""A published model is shown in the place of a replica's own, which comes back, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.core.published import PIECE, PublishedModel, swap_values
from offbeat.core.replica import Replica


@pytest.mark.parametrize("size", [1, PIECE, 2 * PIECE + 3])
def test_values_are_swapped_piece_by_piece(size: int) -> None:
    one, other = torch.arange(size, dtype=torch.float32), -torch.arange(size, dtype=torch.float32)
    swap_values(one, other)
    assert torch.equal(one, -torch.arange(size)) and torch.equal(other, torch.arange(size).float())


def test_tensors_in_another_order_of_memory_are_swapped_too() -> None:
    one, other = torch.arange(6.0).view(2, 3).t(), torch.zeros(3, 2)
    swap_values(one, other)
    assert not one.any() and torch.equal(other, torch.arange(6.0).view(2, 3).t())


def test_a_model_is_shown_and_taken_back() -> None:
    replica = Replica(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    own = [tensor.clone() for tensor in (*replica.weights, *replica.buffers.all())]
    shown = PublishedModel(
        [torch.full_like(weight, 7) for weight in replica.weights],
        [torch.full_like(buffer, 5) for buffer in replica.buffers.all()],
    )
    restore = shown.show(replica)
    assert all((param == 7).all() for param in replica.model.parameters())
    assert all((buffer == 5).all() for buffer in replica.model.buffers())
    restore()
    assert all(map(torch.equal, (*replica.weights, *replica.buffers.all()), own))


def test_the_replicas_own_tensors_stay_where_they_are() -> None:
    replica = Replica(nn.Linear(3, 2))
    before = [weight.clone() for weight in replica.weights]
    restore = PublishedModel(replica.weights, []).show(replica)
    assert all(map(torch.equal, replica.weights, before))
    restore()
    assert all(map(torch.equal, replica.weights, before))
