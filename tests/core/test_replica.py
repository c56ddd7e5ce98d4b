"""Replica: whole parameters in blocks, in backward order, each block a slice of one flat buffer."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat
from offbeat.core.blocks import (
    FIRST_BLOCK_BYTES,
    LARGEST_BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    Block,
    block_sizes,
    make_blocks,
    trainable_bytes,
)
from offbeat.core.gradients import lay_out_gradients
from offbeat.core.partition import ALIGNMENT_BYTES
from offbeat.core.replica import Replica
from tests.conformance.features import mixed_dtypes
from tests.support import loops

Named = list[tuple[str, nn.Parameter]]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)


def _named(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> Named:
    torch.manual_seed(0)
    return [
        (f"p{i}", nn.Parameter(torch.randn(shape, dtype=dtype))) for i, (shape, dtype) in enumerate(kinds)
    ]


def _model(named: Named) -> nn.Module:
    model = nn.Module()
    for name, param in named:
        model.register_parameter(name, param)
    return model


def _by_dtype(blocks: list[Block]) -> dict[torch.dtype, list[Block]]:
    grouped = defaultdict(list)
    for block in blocks:
        grouped[block.params[0].dtype].append(block)
    return grouped


def _nbytes(block: Block) -> int:
    return sum(p.numel() * p.element_size() for p in block.params)


@given(parameters, st.integers(1, 2000), st.integers(1, 2000))
def test_blocks_are_whole_parameters_in_backward_order(kinds, first_bytes: int, block_bytes: int) -> None:
    named = _named(kinds)
    blocks = make_blocks(named, first_bytes, block_bytes)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for dtype, alike in _by_dtype(blocks).items():
        expected = [(n, p) for n, p in reversed(named) if p.dtype == dtype]
        found = [(n, p) for b in alike for n, p in zip(b.names, b.params, strict=True)]
        assert [n for n, _ in found] == [n for n, _ in expected]
        assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))
        for block in alike[:-1]:
            assert _nbytes(block) >= (block_bytes if block.index else first_bytes)
        for block in alike:  # no longer than it must be: without its last parameter it would be too small
            limit = max(block_bytes, first_bytes)
            assert _nbytes(block) - block.params[-1].numel() * block.params[-1].element_size() < limit


@settings(deadline=None)
@given(parameters)
def test_layout_keeps_values_and_shapes_in_one_buffer(kinds) -> None:
    named = _named(kinds)
    values = [p.detach().clone() for _, p in named]
    replica = Replica(_model(named))
    lay_out_gradients(replica)
    for (_, param), value in zip(named, values, strict=True):
        assert torch.equal(param, value)
        assert param.stride() == value.stride()
    for flat, alike in zip(replica.weights, _by_dtype(replica.blocks).values(), strict=True):
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


@pytest.mark.parametrize(
    ("layers", "width", "blocks"),
    [(4, 64, 1), (16, 64, 1), (32, 128, 8), (32, 280, 11), (12, 512, 12), (64, 1024, 33)],
    ids=["66 kB", "266 kB", "2 MB", "10 MB", "13 MB", "269 MB"],
)
def test_models_are_cut_into_a_dozen_blocks_neither_tiny_nor_huge(
    layers: int, width: int, blocks: int
) -> None:
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(layers)))
    sizes = [
        _nbytes(block)
        for block in make_blocks(model.named_parameters(), *block_sizes(trainable_bytes(model)))
    ]
    assert len(sizes) == blocks
    assert sum(sizes) == trainable_bytes(model)
    layer = sum(p.nbytes for p in model[0].parameters())
    assert sizes[0] <= FIRST_BLOCK_BYTES + layer, "sending starts early"
    assert max(sizes) <= LARGEST_BLOCK_BYTES + layer
    assert all(size >= SMALLEST_BLOCK_BYTES for size in sizes[:-1])


def _storages(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_is_one_copy_of_weights_and_one_of_gradients() -> None:
    model = loops.mlp()
    replica = Replica(model)
    nothing = [block.marked for block in replica.blocks]
    assert _storages(nothing) == 0  # a strategy that does not ask for blocks of gradients pays nothing
    padded = sum((p.nbytes + 63) // 64 * 64 for p in model.parameters())
    assert _storages([p.data for p in model.parameters()]) == padded  # moved there, not copied
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


def test_marks_tell_who_has_a_gradient() -> None:
    model = nn.Linear(4, 3)
    replica = Replica(model)
    lay_out_gradients(replica)
    (block,) = replica.blocks
    assert block.names == ["bias", "weight"]
    block.absent.append(model.weight)
    block.mark()
    assert block.marked[block.numel :].tolist() == [1, 0]
    assert block.name_of(model.weight) == "weight"
    block.marked[-1] = 0.5  # the mean over two workers: the other one has one
    block.hand_out()
    assert model.weight.grad is block.grad_views[1]
    block.absent.append(model.weight)
    block.mark()
    block.hand_out()
    assert model.weight.grad is None
    assert not block.absent


def test_layout_is_guarded() -> None:
    model = loops.mlp()
    replica = Replica(model)
    replica.check_layout()
    model.double()
    with pytest.raises(
        offbeat.OffbeatError, match=r"parameter 4.bias was moved .* close\(\) and attach again"
    ):
        replica.check_layout()


def test_what_cannot_train() -> None:
    with pytest.raises(offbeat.SettingError, match="no trainable parameter"):
        Replica(nn.ReLU())
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(offbeat.SettingError, match=r"parameter wave is torch.complex64"):
        Replica(model)


def test_samples_are_taken_once() -> None:
    replica = Replica(loops.mlp())
    replica.inputs.samples += 8
    assert replica.inputs.take_samples() == 8
    with pytest.raises(offbeat.SettingError, match=r"sync.samples\(len\(batch\)\)"):
        replica.inputs.take_samples()
