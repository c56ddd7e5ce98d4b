"""Replica: the weights of a model in flat buffers, and parameters as views of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import offbeat
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.partition import ALIGNMENT_BYTES
from offbeat.core.replica import Replica
from tests.conformance.features import mixed_dtypes
from tests.support import loops
from tests.support.parameters import Named, by_dtype, named_parameters, parameters


def _model(named: Named) -> nn.Module:
    model = nn.Module()
    for name, param in named:
        model.register_parameter(name, param)
    return model


@settings(deadline=None)
@given(parameters)
def test_layout_keeps_values_and_shapes_in_one_buffer(kinds) -> None:
    named = named_parameters(kinds)
    values = [p.detach().clone() for _, p in named]
    replica = Replica(_model(named))
    lay_out_gradients(replica)
    for (_, param), value in zip(named, values, strict=True):
        assert torch.equal(param, value)
        assert param.stride() == value.stride()
    for flat, alike in zip(replica.weights, by_dtype(replica.blocks).values(), strict=True):
        assert flat.is_contiguous()
        assert torch.equal(torch.cat([block.weight for block in alike]), flat)
        assert all(b.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for b in alike)
    for block in replica.blocks:
        assert block.grad.shape == block.weight.shape
        assert block.marked.numel() == block.numel + len(block.params)
        for view, offset in zip(block.grad_views, block.offsets, strict=True):
            assert offset * view.element_size() % ALIGNMENT_BYTES == 0


def _slots(flat: Tensor, views: list[Tensor]) -> int:
    """How many elements of `flat` the views reach; each element once, or this fails."""
    flat.zero_()
    for view in views:
        view.add_(1)
    assert flat.max() <= 1
    return int(flat.sum())


def _odd_model() -> nn.Module:
    model = nn.Module()
    torch.manual_seed(0)
    model.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.turned = nn.Parameter(torch.randn(3, 5).t())
    model.scalar = nn.Parameter(torch.randn(()))
    model.sliced = nn.Parameter(
        torch.randn(4, 8)[:, :3]
    )  # with holes, so its strides are no layout for a slot
    model.last = nn.Parameter(torch.randn(7))
    return model


def test_no_two_parameters_share_memory_whatever_their_strides() -> None:
    model = _odd_model()
    values = loops.tensors(model)
    replica = Replica(model)
    lay_out_gradients(replica)
    assert loops.equal(values, loops.tensors(model))
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.turned.stride() == (1, 5)
    total = sum(p.numel() for p in model.parameters())
    (block,) = replica.blocks
    assert _slots(block.weight, block.views(block.weight)) == total
    assert _slots(block.grad, block.grad_views) == total
    assert _slots(replica.weights[0], [p.detach() for p in model.parameters()]) == total


def test_weights_are_aligned() -> None:
    replica = Replica(mixed_dtypes(0))
    for block in replica.blocks:
        start = block.weight.data_ptr()
        for param in block.params:
            assert (param.data_ptr() - start) % ALIGNMENT_BYTES == 0


def _storages(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_is_one_copy_of_weights_and_one_of_gradients() -> None:
    model = loops.mlp()
    replica = Replica(model)
    nothing = [block.marked for block in replica.blocks]
    assert _storages(nothing) == 0  # a strategy that does not ask for blocks of gradients pays nothing
    padded = sum((p.nbytes + 63) // 64 * 64 for p in model.parameters())
    assert _storages([p.data for p in model.parameters()]) == sum(p.nbytes for p in model.parameters())
    spans = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in replica.weights]
    for param in model.parameters():  # moved there, not copied
        assert any(start <= param.data_ptr() < stop for start, stop in spans)
    assert _storages(replica.weights) == padded
    grads = lay_out_gradients(replica)
    marks = sum(p.element_size() for p in model.parameters())
    assert _storages(grads) == _storages([b.marked for b in replica.blocks]) == padded + marks


def test_release_gives_every_parameter_memory_of_its_own() -> None:
    model = _odd_model()
    values = loops.tensors(model)
    replica = Replica(model)
    replica.release()
    assert loops.equal(values, loops.tensors(model))
    assert _storages([p.data for p in model.parameters()]) == sum(p.nbytes for p in model.parameters())
    replica.weights[0].zero_()
    assert loops.equal(values, loops.tensors(model))


def test_layout_is_guarded() -> None:
    model = loops.mlp()
    replica = Replica(model)
    replica.keep_layout()
    model.double()
    with pytest.raises(
        offbeat.OffbeatError, match=r"parameter 4.bias was moved .* close\(\) and attach again"
    ):
        replica.keep_layout()


def test_a_parameter_that_was_assigned_other_memory_is_taken_back() -> None:
    model = loops.mlp()
    replica = Replica(model)
    replica.keep_layout()
    for number, param in enumerate(model.parameters()):  # also the ones inside a block
        param.data = torch.full_like(param, number)
    replica.keep_layout()
    for number, param in enumerate(model.parameters()):
        assert (param == number).all()
    replica.weights[0].fill_(7)
    assert all((param == 7).all() for param in model.parameters())


def test_what_cannot_train() -> None:
    with pytest.raises(offbeat.SettingError, match="no trainable parameter"):
        Replica(nn.ReLU())
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(offbeat.SettingError, match=r"parameter wave is torch.complex64"):
        Replica(model)
