"""CollectivePort: what is started for each operation, and what a worker alone need not start."""

from __future__ import annotations

import pytest
import torch

from offbeat.core.port import Lane, Op, Signature
from offbeat.errors import OffbeatError
from tests.support.lone_port import NotingPort


def slices(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


def test_a_worker_alone_starts_nothing_and_has_the_result_at_once() -> None:
    port = NotingPort()
    tensor, (own,) = torch.ones(3), slices(4)
    incoming = slices(4)
    assert port.all_reduce(tensor, Op.SUM).result() is tensor
    assert port.broadcast(tensor).result() is tensor
    assert port.reduce_scatter([own]).result() is own
    assert port.all_gather([own]).result() == [own]
    assert port.all_to_all([own], incoming).result() is incoming
    assert port.started == []


def test_operations_are_described_by_name_detail_and_bytes_on_their_lane() -> None:
    port = NotingPort(rank=1, world=2)
    tensor, outgoing, incoming = torch.ones(3), slices(2, 5), slices(5, 5)
    assert port.all_reduce(tensor).result() is tensor
    assert port.broadcast(tensor, root=1, lane=Lane.BACK).result() is tensor
    assert port.reduce_scatter(outgoing, Op.MAX).result() is outgoing[1]
    assert port.all_gather(outgoing, Lane.BACK).result() is outgoing
    assert port.all_to_all(outgoing, incoming).result() is incoming
    assert port.started == [
        (Signature("all_reduce", "mean", (12,)), Lane.FRONT),
        (Signature("broadcast", "1", (12,)), Lane.BACK),
        (Signature("reduce_scatter", "max", (8, 20)), Lane.FRONT),
        (Signature("all_gather", "slices", (8, 20)), Lane.BACK),
        (Signature("all_to_all", "slices", (8, 20)), Lane.FRONT),
    ]


@pytest.mark.parametrize("world", [1, 3])
def test_a_worker_without_a_slice_is_refused_before_all_wait_for_it(world: int) -> None:
    port = NotingPort(world=world)
    words = f"2 slices for {world} workers: there must be one per worker"
    fitting = slices(*[1] * world)
    for start in (
        lambda: port.reduce_scatter(slices(1, 1)),
        lambda: port.all_gather(slices(1, 1)),
        lambda: port.all_to_all(slices(1, 1), fitting),
        lambda: port.all_to_all(fitting, slices(1, 1)),
    ):
        with pytest.raises(OffbeatError, match=words):
            start()
    assert port.started == []


def test_a_strategy_without_a_server_half_has_no_server() -> None:
    with pytest.raises(OffbeatError, match=r"no parameter server: its server_half\(\) returns None"):
        _ = NotingPort().server
