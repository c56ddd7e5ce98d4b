"""One flipped bit in one worker's weights or buffers is found, and named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.core.checksum import _equal, bits, check_identical
from offbeat.core.conductor import drive
from offbeat.core.pending import Arrived, Pending, block_on
from offbeat.core.port import Op
from offbeat.core.replica import Replica
from offbeat.errors import OffbeatError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


class Pair:
    """A port to one other worker, whose tensors are given: a maximum is taken of both workers' sums."""

    world = 2

    def __init__(self, theirs: list[Tensor]) -> None:
        self._theirs = theirs

    def all_reduce(self, own: Tensor, op: Op) -> Pending[Tensor]:
        assert op is Op.MAX
        return Arrived(torch.maximum(own, self._theirs.pop(0)))


class Recording:
    """A port that notes what this worker sends; the other one always agrees."""

    world = 2

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def all_reduce(self, own: Tensor, op: Op) -> Pending[Tensor]:
        self.sent.append(own.clone())
        return Arrived(own)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.randn(()))


def _flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit, counted over the whole tensor."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    byte, position = divmod(bit % (8 * raw.numel()), 8)
    if tensor.dtype is torch.bool:
        position = 0
    raw[byte] ^= 1 << position


def _sent(model: nn.Module) -> tuple[Replica, list[Tensor]]:
    """What a worker that holds this model sends, tensor by tensor after the first look."""
    replica, port = Replica(model), Recording()
    block_on(drive(check_identical(replica, port)))  # type: ignore[arg-type]
    for tensor in _in_order(replica):
        block_on(_equal([tensor.detach()], port))  # type: ignore[arg-type]
    return replica, port.sent


def _in_order(replica: Replica) -> list[Tensor]:
    return [p for block in replica.blocks for p in block.params] + list(replica.model.buffers())


NAMES = ["body.weight", "body.bias", "norm.weight", "wide", "scalar", "norm.running_mean", "mask"]


@given(st.sampled_from([*NAMES, "norm.num_batches_tracked"]), st.integers(0, 10**6))
def test_any_single_bit_is_found_and_named(name: str, bit: int) -> None:
    other = Model()
    _flip(other.state_dict()[name], bit)
    _, sent = _sent(other)
    with pytest.raises(OffbeatError, match=rf"consensus\(\): {name} differs"):
        block_on(drive(check_identical(Replica(Model()), Pair(sent))))  # type: ignore[arg-type]


def test_equal_models_pass() -> None:
    _, sent = _sent(Model())
    block_on(drive(check_identical(Replica(Model()), Pair(sent))))  # type: ignore[arg-type]


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 10**6), st.integers(0, 100))
def test_any_bit_of_any_kind_changes_the_sum(dtype: torch.dtype, size: int, bit: int, seed: int) -> None:
    torch.manual_seed(seed)
    tensor = torch.randn(size).to(dtype)
    before = bits(tensor)
    _flip(tensor, bit)
    assert bits(tensor) != before


@given(st.integers(2, 5000), st.integers(0, 10**6), st.integers(0, 10**6))
def test_values_that_changed_places_change_the_sum(size: int, one: int, other: int) -> None:
    tensor = torch.zeros(size)
    tensor[one % size] = 1
    moved = torch.zeros(size)
    moved[other % size] = 1
    assert (bits(tensor) == bits(moved)) == (one % size == other % size)


def test_of_complex_numbers_nans_and_none() -> None:
    assert bits(torch.tensor([1j, torch.nan])) == bits(torch.tensor([1j, torch.nan]))
    assert bits(torch.tensor([1j])) != bits(torch.tensor([-1j]))
    assert bits(torch.tensor(0.0)) != bits(torch.tensor(-0.0))
    assert bits(torch.empty(0)) == 0
