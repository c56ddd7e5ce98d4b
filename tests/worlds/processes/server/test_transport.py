"""The transport to all shards: real shards in threads, every message, and the bytes that are counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offbeat import ASP, OSP, SSP
from offbeat.core.pending import block_on
from offbeat.core.port import Op
from offbeat.errors import OffbeatError
from offbeat.server.sharding import shard_bounds
from offbeat.worlds.processes.ledger import SharedLedger
from offbeat.worlds.processes.server.channel import ClientIdentity
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.transport import ProcessServerClient, TcpTransport
from tests.support.beside import beside, post
from tests.support.limits import HANG_S
from tests.support.virtual_runs import AnyStrategy

pytestmark = pytest.mark.processes

NUMEL, SHARDS = 10, 2


@contextmanager
def client_of(
    folder: Path,
    local_shards: range | None = None,
    strategy: AnyStrategy = ASP(),  # noqa: B008
) -> Iterator[ProcessServerClient]:
    """A worker and two shards, which hold ten ones."""
    store, ran = dist.HashStore(), []
    for shard in range(SHARDS):
        ((low, high),) = shard_bounds([NUMEL], shard, SHARDS)
        told = post(folder / str(shard), [("float32", high - low)], strategy.name, **strategy.settings())
        config = replace(told, shard=shard)
        ran.append(beside(ShardServer(config, store, b"secret").run))
    identity = ClientIdentity(store, "127.0.0.1", 0, b"secret", HANG_S)
    weights, now = [torch.ones(NUMEL)], iter(range(1_000_000))
    ledger = SharedLedger(0, lambda: float(next(now)))
    ledger.start()
    transport = TcpTransport(identity, ["shard 0", "shard 1"], weights, ledger, local_shards=local_shards)
    half = strategy.server_half()
    assert half is not None
    client = ProcessServerClient(transport, half, world=2, weights=weights, state_parts=0)
    assert not transport.has_weights
    block_on(client.load(weights))
    assert transport.has_weights
    yield client
    client.close(HANG_S)
    for each in ran:
        each.result(HANG_S)


def test_slices_go_to_their_shards_and_come_back(tmp_path: Path) -> None:
    update, into = torch.arange(float(NUMEL)), torch.zeros(NUMEL)
    with client_of(tmp_path) as client:
        push = client.push([update], 1)
        push.wait()
        assert push.done() and push.result() is True
        assert [channel.clock for channel in client.transport.channels] == [1, 1]
        client.pull([into], 1).wait()
        assert torch.equal(into, update + 1)
        assert client.transport.server_pid is None, "no shard is of this rank"


def test_a_look_passes_a_pull_that_waits_and_counts_nothing(tmp_path: Path) -> None:
    """A pull at clock 3 waits for ever, since this worker has pushed once."""
    with client_of(tmp_path, strategy=SSP(staleness=0)) as client:
        client.push([torch.ones(NUMEL)], 1).wait()
        waiting = client.pull([torch.zeros(NUMEL)], 3)
        before = client.transport.ledger.totals()
        for _ in range(2):
            seen = torch.zeros(NUMEL)
            block_on(_read(client, seen))
            assert seen.tolist() == [2.0] * NUMEL
        after = client.transport.ledger.totals()
        assert not waiting.done()
        assert (after.bytes_sent, after.bytes_server) == (before.bytes_sent, before.bytes_server)


async def _read(client: ProcessServerClient, into: torch.Tensor) -> None:
    await client.read([into])


def test_a_reduction_comes_back_into_the_same_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    with client_of(tmp_path, strategy=OSP(on="server")) as client:
        client.all_reduce(tensor, Op.SUM).wait()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_reduction_that_no_shard_has_memory_for_is_refused(tmp_path: Path) -> None:
    with (
        client_of(tmp_path) as client,
        pytest.raises(OffbeatError, match="is too large for a shard to reduce"),
    ):
        client.all_reduce(torch.zeros(1 << 20), Op.SUM)


@pytest.mark.parametrize(("local_shards", "left"), [(None, 0), (range(1), 2 * NUMEL), (range(2), 0)])
def test_what_stays_on_this_host_has_not_left_it(
    tmp_path: Path, local_shards: range | None, left: int
) -> None:
    with client_of(tmp_path, local_shards) as client:
        ledger = client.transport.ledger
        before = ledger.bytes_sent, ledger.bytes_left_host
        client.push([torch.zeros(NUMEL)], 1).wait()
        assert (ledger.bytes_sent - before[0], ledger.bytes_left_host - before[1]) == (4 * NUMEL, left)
        client.pull([torch.zeros(NUMEL)], None).wait()
        answered = 4 * NUMEL - left  # by shards of this host; another host's worker counts for the others
        assert (ledger.bytes_sent - before[0], ledger.bytes_left_host - before[1]) == (
            4 * NUMEL + answered,
            left,
        )


def test_what_a_server_on_another_host_sends_is_in_the_total(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        for channel in client.transport.channels:
            channel.is_on_host = False
        ledger = client.transport.ledger
        client.push([torch.zeros(NUMEL)], 1).wait()
        client.pull([torch.zeros(NUMEL)], None).wait()
        totals = ledger.totals()
        assert (totals.bytes_server, totals.bytes_total) == (4 * NUMEL, totals.bytes_sent + 4 * NUMEL)


def test_refused_updates_are_counted_and_the_first_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(tmp_path) as client, caplog.at_level(logging.WARNING, "offbeat"):
        for number in (1, 2):
            push = client.push([torch.full((NUMEL,), float("nan"))], number)
            push.wait()
            assert push.result() is False
            assert client.transport.ledger.refused == number, "once, though both shards refuse"
    told = [record.getMessage() for record in caplog.records if record.name == "offbeat.refused"]
    assert [text.partition(";")[0] for text in told] == [
        "the server did not use update 1 of this worker: it is not finite"
    ]


def test_after_a_restart_clocks_count_from_the_beginning(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        client.push([torch.zeros(NUMEL)], 1).wait()
        block_on(client.load([torch.full((NUMEL,), 5.0)]))
        client.restart()
        assert [channel.clock for channel in client.transport.channels] == [0, 0]
        client.push([torch.ones(NUMEL)], 1).wait()
        into = torch.zeros(NUMEL)
        client.pull([into], 1).wait()
        assert into.tolist() == [6.0] * NUMEL
