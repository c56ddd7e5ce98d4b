"""Shares between real ranks: in the background, in memory taken once, and never waiting for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import Strategy
from offbeat.core.pending import Pending, block_on
from offbeat.core.port import Lane, Op, Port
from offbeat.core.replica import Replica
from offbeat.worlds.processes import pairwise
from offbeat.worlds.processes.pairwise import QueuedWork
from offbeat.worlds.processes.port import ProcessPort
from tests.support import loops
from tests.support.allocations import recording_allocations
from tests.support.crew import Crew
from tests.support.exchanges import drawn, process_port
from tests.support.limits import HANG_S, SILENCE_S
from tests.support.lost import patched, wait_for_all_but
from tests.support.ports import free_port
from tests.support.python import Python
from tests.support.waiting import until

pytestmark = pytest.mark.processes

THREAD = "offbeat-exchange"
MIB = 1 << 20


def _running() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


async def _there_and_back(port: Port, shares: list[torch.Tensor], lane: Lane = Lane.FRONT) -> None:
    await port.reduce_scatter(shares, Op.MEAN, lane)
    await port.all_gather(shares, lane)


# --- in the background


def _unattended() -> tuple[int, int]:
    """Nobody waits: the shares arrive all the same. Threads while the port is open, and afterwards."""
    with process_port() as port:
        for lane in Lane:
            shares = drawn([70_000] * port.world, torch.float32, port.rank)
            pending = port.reduce_scatter(shares, lane=lane)
            while not pending.done():
                pass
            assert port.ledger.wait_s == 0
            pending.result()
        during = _running()
    return during, _running()


def test_shares_travel_while_nobody_waits(crew: Callable[[int], Crew]) -> None:
    assert crew(2).run(_unattended) == [(2, 0)] * 2, "a thread a lane, and none is left"


def _no_shares() -> int:
    with process_port() as port:
        block_on(_reduced(port))
        return _running()


async def _reduced(port: Port) -> None:
    await port.all_reduce(torch.ones(3))


def test_who_has_no_shares_has_no_thread(crew: Callable[[int], Crew]) -> None:
    assert crew(2).run(_no_shares) == [0, 0]


# --- memory


def _allocated(piece_bytes: int) -> list[int]:
    """The largest allocation in every exchange of some steps, as torch's profiler sees it on their thread."""
    largest = []
    run = QueuedWork.run

    def watched(queued: QueuedWork) -> None:
        with recording_allocations() as sizes:
            run(queued)
        largest.append(max(sizes, default=0))

    with process_port() as port, pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueuedWork, "run", watched)
        patch.setattr(pairwise, "PIECE_BYTES", piece_bytes)
        for _ in range(3):
            for size in (MIB, MIB // 2):
                block_on(_there_and_back(port, drawn([size] * port.world, torch.float32, 0)))
    return largest


def test_memory_is_taken_once(crew: Callable[[int], Crew]) -> None:
    for first, *later in crew(2).run(_allocated, pairwise.PIECE_BYTES):
        assert first == 4 * MIB, "where the other's share lands"
        assert max(later) < 1000


def test_large_shares_are_reduced_in_pieces(crew: Callable[[int], Crew]) -> None:
    for first, *later in crew(2).run(_allocated, 4 * MIB // 100):
        assert first == 4 * MIB // 8, "where a piece of the other's share lands"
        assert max(later) < 1000


def _in_pieces(piece_bytes: int) -> list[torch.Tensor]:
    """Sums and maxima of shares of all sizes: of none, of fewer entries than pieces, and of many."""
    results = []
    with process_port() as port, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "PIECE_BYTES", piece_bytes)
        for op in Op:
            for sizes in ([5, 0, 3], [1000, 7, 1001], [0, 0, 0]):
                own = port.reduce_scatter(drawn(sizes, torch.float32, port.rank), op)
                own.wait()
                results.append(own.result().clone())
    return results


def test_pieces_add_up_to_the_same_bits(crew: Callable[[int], Crew]) -> None:
    whole, cut = (crew(3).run(_in_pieces, nbytes) for nbytes in (4 * MIB, 1))
    for one, other in zip(whole, cut, strict=True):
        assert len(one) == 9
        assert all(map(torch.equal, one, other))


# --- the ledger


def _counted(bits_per_s: float | None) -> tuple[Any, int, int]:
    sizes = [1000, 0, 500]
    with process_port(bits_per_s=bits_per_s) as port:
        shares = drawn(sizes, torch.float64, port.rank)
        scattered = port.reduce_scatter(shares)
        scattered.wait()
        sent = port.ledger.bytes_sent
        port.all_gather(shares).wait()
        return port.ledger.totals(), sent, port.ledger.bytes_sent - sent


def test_bytes_by_hand(crew: Callable[[int], Crew]) -> None:
    outcomes = crew(3).run(_counted, None)
    assert [scattered for _, scattered, _ in outcomes] == [8 * 500, 8 * 1500, 8 * 1000]
    assert [gathered for _, _, gathered in outcomes] == [8 * 2000, 0, 8 * 1000]
    for entry, _, _ in outcomes:
        assert 0 < entry.communicate_s < entry.seconds
        assert 0 < entry.wait_s < entry.seconds


def test_a_slower_network_is_emulated(crew: Callable[[int], Crew]) -> None:
    for entry, scattered, gathered in crew(3).run(_counted, 8e6):
        assert entry.communicate_s == pytest.approx((scattered + gathered) / 1e6)
        assert entry.seconds >= entry.communicate_s


# --- ranks that die, stop or raise


async def _troubled_loop(port: ProcessPort, trouble: int, who: int, at: str) -> None:
    for step in range(6):
        shares = drawn([4000, 0, 1000, 70_000][: port.world], torch.float32, port.rank)
        into = [torch.zeros_like(shares[port.rank]) for _ in shares]
        for moment in ("scatter", "gather", "swap"):
            if (port.rank, step, moment) == (who, 3, at):
                os.kill(os.getpid(), trouble)
            if (step, moment) == (3, at):
                port.timeout_s = SILENCE_S  # from here on that one takes part in nothing
            if moment == "scatter":
                await port.reduce_scatter(shares, lane=Lane.BACK)
            elif moment == "gather":
                await port.all_gather(shares, lane=Lane.BACK)
            else:
                await port.all_to_all(shares, into, lane=Lane.BACK)


def _troubled(trouble: int, who: int, at: str, patch: pytest.MonkeyPatch) -> None:
    wait_for_all_but(who, patch)
    with process_port() as port:
        block_on(_troubled_loop(port, trouble, who, at))


@pytest.mark.parametrize(
    ("trouble", "world", "who", "at"),
    [(signal.SIGKILL, 4, 2, "gather"), (signal.SIGSTOP, 2, 1, "scatter"), (signal.SIGKILL, 4, 1, "swap")],
)
def test_a_lost_rank_is_named_by_all_others(trouble: int, world: int, who: int, at: str) -> None:
    crew = Crew(world)
    others = [rank for rank in range(world) if rank != who]
    try:
        crew.start(patched, _troubled, trouble, who, at)
        for well, value in crew.outcomes(others):
            assert not well
            name, message, _ = value
            assert name == "RankLost"
            assert f"rank {who} is gone or stuck" in message
            assert not any(f"rank {rank} is" in message for rank in others)
    finally:
        crew.dismiss()


@dataclass(frozen=True, kw_only=True)
class Shared(Strategy[list[Pending[Any]]]):
    """Scatters in the background, a step behind."""

    name: ClassVar[str] = "shared"
    summary: ClassVar[str] = "for this test"

    def init(self, replica: Replica) -> list[Pending[Any]]:
        return []

    async def step(self, state: list[Pending[Any]], replica: Replica, port: Port) -> None:
        await replica.update()
        await self.drain(state, replica, port)
        shares = list(torch.zeros(100 * port.world).split(100))
        state.append(port.reduce_scatter(shares, lane=Lane.BACK))

    async def drain(self, state: list[Pending[Any]], replica: Replica, port: Port) -> None:
        while state:
            await state.pop()


def _raising() -> str:
    rank = dist.get_rank()
    model = loops.mlp()
    optimizer = loops.sgd(model)

    def strike(step: int) -> None:
        if (rank, step) == (1, 2):
            raise ValueError("out of coffee")

    try:
        with offbeat.attach(model, optimizer, Shared(), timeout_s=HANG_S):
            loops.train(model, optimizer, loops.batches(rank, 6), after_step=strike)
    except (ValueError, offbeat.OffbeatError) as told:
        until(lambda: not _running())
        return f"{type(told).__name__}: {told}; {_running()} threads"
    return "all well"


def test_a_rank_that_raises_leaves_no_thread(crew: Callable[[int], Crew]) -> None:
    witness, culprit = crew(2).run(_raising)
    assert culprit == "ValueError: out of coffee; 0 threads"
    assert witness.startswith("RankLost: rank 1 failed: ValueError: out of coffee")
    assert witness.endswith("0 threads")


SCRIPT = """
import atexit, os, threading, torch
from offbeat.worlds.processes.rendezvous import connect_group

@atexit.register  # first in, last out
def report():
    print("offbeat-exchange" in [thread.name for thread in threading.enumerate()])

port = connect_group(torch.device("cpu"), {}, 600)
if port.rank:
    os.read(0, 1)
pending = port.reduce_scatter([torch.zeros(1000), torch.zeros(1000)])
raise SystemExit(3)
"""


def test_no_thread_outlives_python() -> None:
    """One that waits inside gloo would abort the process when its partner goes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, "WORLD_SIZE": "2", **place}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first, other = (Python("-c", SCRIPT, env={**env, "RANK": rank}, **pipes) for rank in "01")
    try:
        assert first.communicate(timeout=HANG_S)[0] == b"False\n"
        assert first.returncode == 3
    finally:
        for process in (first, other):
            process.kill()
            process.communicate()
