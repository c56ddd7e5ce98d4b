"""Plays with shares that run in both worlds, word for word."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.pending import block_on
from offbeat.core.port import Lane, Op, Port
from offbeat.core.slices import Slices
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.virtual.cluster import Cluster, Workers
from offbeat.worlds.virtual.collectives import CollectiveQueue
from offbeat.worlds.virtual.network import Network
from offbeat.worlds.virtual.port import VirtualPort
from offbeat.worlds.virtual.scheduler import Scheduler
from tests.support.limits import HANG_S

Play = Callable[..., Coroutine[Any, None, list[Tensor]]]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def sizes_of(world: int) -> list[list[int]]:
    """Even shares; uneven ones, some of them empty; none that is not."""
    return [[64] * world, [1000, 0, 4099, 17][:world], [0] * (world - 1) + [70_001], [0] * world]


def drawn(sizes: list[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Slices of one buffer, with numbers of many magnitudes: any other order of adding them shows."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(sizes), generator=generator, dtype=dtype)
    flat *= torch.exp(4 * torch.randn(sum(sizes), generator=generator, dtype=dtype))
    return list(flat.split(sizes))


# --- plays


async def to_owners_and_back(port: Port, dtype: torch.dtype, op: Op = Op.MEAN) -> list[Tensor]:
    """What every scatter left with this worker, and every gather with all."""
    seen = []
    for sizes in sizes_of(port.world):
        shares = drawn(sizes, dtype, port.rank)
        own = await port.reduce_scatter(shares, op)
        assert own is shares[port.rank]
        seen.append(own.clone())
        assert await port.all_gather(shares) is shares
        seen.append(torch.cat(shares))
    return seen


async def through_flat_memory(port: Port, dtype: torch.dtype, op: Op = Op.MEAN) -> list[Tensor]:
    """The same with shares in flat memory: in one tensor, in three, or in a list, as the turn comes."""
    seen = []
    for turn, sizes in enumerate(sizes_of(port.world)):
        shares = list(map(torch.clone, drawn(sizes, dtype, port.rank)))
        before, after = (
            torch.cat([shares[0][:0], *part]) for part in (shares[: port.rank], shares[port.rank + 1 :])
        )
        kinds: list[Sequence[Tensor]] = [
            Slices(tuple(sizes), torch.cat(shares)),
            Slices(tuple(sizes), before, shares[port.rank], after),
            shares,
        ]
        flat = kinds[(port.rank + turn) % 3]
        own = await port.reduce_scatter(flat, op)
        assert own.data_ptr() == flat[port.rank].data_ptr()
        seen.append(own.clone())
        assert await port.all_gather(flat) is flat
        seen.append(torch.cat(list(flat)))
    return seen


async def swapped(port: Port, dtype: torch.dtype) -> list[Tensor]:
    """What every swap brought this worker from all; what it has for itself stays with it."""
    seen = []
    for sizes in sizes_of(port.world):
        away = drawn(sizes, dtype, port.rank)
        into = [torch.full_like(away[port.rank], 7) for _ in sizes]
        assert await port.all_to_all(away, into) is into
        assert (into[port.rank] == 7).all()
        seen += into
    return seen


async def all_at_once(port: Port) -> list[Tensor]:
    """Operations of all kinds under way on one lane, awaited in another order by every worker."""
    sizes = [1000, 0, 4099, 17][: port.world]
    shares = [drawn(sizes, torch.float32, 100 * each + port.rank) for each in range(5)]
    dealt = [torch.zeros(sizes[port.rank]) for _ in sizes]
    whole = [torch.cat(drawn(sizes, torch.float32, 100 * each + port.rank)) for each in range(3)]
    started = [
        port.reduce_scatter(shares[0], Op.SUM),
        port.all_reduce(whole[0]),
        port.all_gather(shares[1]),
        port.reduce_scatter(shares[2]),
        port.broadcast(whole[1], root=1),
        port.reduce_scatter(shares[3], Op.MAX),
        port.all_to_all(shares[4], dealt),
        port.all_reduce(whole[2], Op.MAX),
    ]
    for index in range(len(started)):
        await started[(port.rank + index) % len(started)]
    owned = [parts[port.rank] for parts in (shares[0], shares[2], shares[3])]
    return [*owned, torch.cat(shares[1]), *whole, *dealt]


async def lanes_crossed(port: Port) -> list[Tensor]:
    """Worker 0 starts at the back and ends at the front, the others the other way round."""
    front, back = (drawn([5, 7, 3, 2][: port.world], torch.float32, port.rank + seed) for seed in (0, 100))
    order = [(back, Lane.BACK), (front, Lane.FRONT)]
    if port.rank == 0:
        started = [port.reduce_scatter(shares, Op.MEAN, lane) for shares, lane in order]
        for pending in reversed(started):
            await pending
    else:
        for shares, lane in reversed(order):
            await port.reduce_scatter(shares, Op.MEAN, lane)
    for shares, lane in order:
        await port.all_gather(shares, lane)
    return [*front, *back]


# --- stages


@contextmanager
def process_port(timeout_s: float = HANG_S, bits_per_s: float | None = None) -> Iterator[ProcessPort]:
    """This rank's port, until all ranks have left."""
    port = connect_group(torch.device("cpu"), {}, timeout_s, bits_per_s)
    port.ledger.start()
    try:
        yield port
    except BaseException as failure:
        port.failures.leave(port.operations, str(failure))
        port.abandon()
        raise
    port.failures.leave(port.operations, "")
    port.failures.wait_for_exit(timeout_s)
    port.close()


def really(play: Play, *args: Any) -> tuple[list[Tensor], WorkerTotals]:
    """A play on one rank of a crew: what it made, and the ledger."""
    with process_port() as port, torch.no_grad():
        return block_on(play(port, *args)), port.ledger.totals()


def equal_workers(world: int, **rest: Any) -> Cluster:
    """On links of 1 MB/s."""
    nic = {"up_bits_per_s": 8e6, "down_bits_per_s": 8e6, **rest}
    return Cluster(workers=(Workers(step_s=1.0, count=world, **nic),))


def virtually(play: Play, cluster: Cluster, *args: Any) -> list[tuple[list[Tensor], WorkerTotals]]:
    """The same of every virtual worker."""
    events = Scheduler(Network(cluster))
    ledgers = [Ledger(rank, lambda: events.now) for rank in range(cluster.size)]
    meetings = {lane: CollectiveQueue(lane, events, ledgers, cluster.size) for lane in Lane}
    made: dict[int, list[Tensor]] = {}

    async def act(rank: int) -> None:
        ledgers[rank].start()
        made[rank] = await play(VirtualPort(rank, meetings, ledgers[rank]), *args)
        ledgers[rank].stop()

    acts = [act(rank) for rank in range(cluster.size)]
    for rank, each in enumerate(acts):
        events.spawn(f"worker {rank}", each)
    try:
        with torch.no_grad():
            events.run()
    finally:
        for each in acts:
            each.close()
    return [(made[rank], ledger.totals()) for rank, ledger in enumerate(ledgers)]
