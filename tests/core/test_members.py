"""Members of a replica: what they reduce over each other, and what a parameter's part is."""

from __future__ import annotations

import torch
from torch import nn

from offbeat.core.blocks import Block, make_blocks
from offbeat.core.members import ALONE, Members, Part, part_of
from offbeat.core.pending import block_on
from offbeat.core.port import Op, Signature
from tests.support.lone_port import NotingPort


async def _value(pending: object) -> object:
    return await pending  # type: ignore[misc]


def test_a_worker_of_one_rank_reduces_nothing() -> None:
    values = torch.tensor([1.0, 2.0])
    for reduce in (ALONE.whole, ALONE.total, ALONE.agree):
        assert block_on(_value(reduce(values))) is values
    assert block_on(ALONE.agree_on(3, 4.0)) == [3, 4.0]
    assert (ALONE.count, ALONE.sharded, ALONE.global_rank(5)) == (1, False, 5)


def test_copies_have_the_whole_and_parts_add_it_up() -> None:
    for sharded in (True, False):
        port = NotingPort(world=3)
        members = Members(port, sharded, global_rank=7)
        assert (members.count, members.global_rank(1)) == (3, 7)
        members.whole(members.vector(1.0))
        members.total(members.vector(1.0))
        assert block_on(members.agree_on(2.0)) == [2.0]
        operations = [signature for signature, _ in port.started]
        expected = [Op.SUM, Op.SUM, Op.MAX] if sharded else [Op.SUM, Op.MAX]
        assert operations == [Signature("all_reduce", op.value, (8,)) for op in expected]


def _local(numel: int, room: int) -> nn.Parameter:
    param = nn.Parameter(torch.ones(numel))
    param.part = Part(room, 2 * room, 0.5)  # type: ignore[attr-defined]
    return param


def test_a_part_is_the_whole_parameter_unless_it_says_otherwise() -> None:
    assert part_of(nn.Parameter(torch.ones(5))) == Part(5, 5, 1.0)
    assert part_of(_local(3, 4)) == Part(4, 8, 0.5)


def test_members_with_unequal_parts_have_equal_blocks() -> None:
    """Room is reserved for the largest part; what is beyond a smaller one is a gap, and is cleared."""
    larger, smaller = (
        make_blocks([("a", _local(n, 100)), ("b", _local(m, 40)), ("c", _local(1, 1))], 256, 256)
        for n, m in ((100, 40), (99, 0))
    )
    assert [(b.names, b.offsets, b.numel) for b in larger] == [(b.names, b.offsets, b.numel) for b in smaller]
    block: Block = next(block for block in smaller if "b" in block.names)
    flat = torch.ones(block.numel)
    block.clear_gaps(flat)
    assert flat.sum() == sum(param.numel() for param in block.params)
