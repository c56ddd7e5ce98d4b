"""Shards whose copies are kept by others are killed at any moment: every acknowledged push is there, once.

Updates are whole numbers: each push adds 1 to every weight, so the weights tell how many pushes they hold.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import pytest
import torch.distributed as dist

import offbeat
from offbeat import ASP, SSP, SettingError
from offbeat.server.journal import Effect, EffectKind
from offbeat.worlds.processes.server import bootstrap, supervisor
from offbeat.worlds.processes.server.auth import challenge
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.copy_wire import receive_effect, receive_state
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.shard_count import PIECES
from offbeat.worlds.processes.server.signed_store import SignedStore
from offbeat.worlds.processes.server.wire import FROM_SHARDS, MessageType, encode_header, read_header
from tests.support import beside
from tests.support.counting import Counting, count_on, counted, counting_optimizer
from tests.support.crew import Crew
from tests.support.limits import HANG_S
from tests.support.served import serve as serve
from tests.support.shards import SIZES, Hand, of
from tests.support.waiting import until

pytestmark = pytest.mark.processes

STEPS = 24
SOON_S = 0.2
TOKEN = b"secret"


def _killed_shards(seed: int, pieces: int) -> tuple[int, int]:
    """Each rank stands for a host. Host 0's shards are killed, then host 1's, at any moment; no snapshot is
    written."""
    rank, random = dist.get_rank(), Random(seed)
    model = Counting(dist.get_world_size())
    optimizer = counting_optimizer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "QUICKLY_S", 0.0)
        patch.setattr(bootstrap, "SNAPSHOT_S", 10_000.0)
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv(bootstrap.REPLICATE, "1")
        patch.setenv(PIECES, str(pieces))
        sync = offbeat.attach(model, optimizer, SSP(staleness=1), timeout_s=HANG_S)
        links: Any = sync.port.client.transport  # type: ignore[union-attr]
        shards = range(2 * pieces)
        assert len(links.channels) == len(shards)
        signed = SignedStore(links.channels[0]._store, links.channels[0]._identity.token)
        moment, copies = Event(), {shard: signed.get(f"copy/{shard}") for shard in shards}
        moments = [STEPS // 4 + random.randrange(4), STEPS // 2 + random.randrange(6)]

        def kill() -> None:
            """While this rank trains on."""
            moment.wait(HANG_S)
            moment.clear()
            os.kill(links.server_pid, signal.SIGKILL)

        killer = Thread(target=kill, daemon=True)
        killer.start()
        for step in range(1, STEPS + 1):
            if step == moments[1] and rank == 1:  # the other one's copy is whole again: one dies at a time
                for shard in shards:
                    until(lambda shard=shard: signed.get(f"copy/{shard}") not in (copies[shard], "0"))
            if step == moments[rank]:
                moment.set()
            count_on(model, optimizer)
        killer.join()
        sync.settle()  # a look does not wait for the last push, which one shard may have and another not
        with sync.consensus():
            total = counted(model)
        steps = sync.metrics.steps
        sync.close(publish=False)
    return total, steps


@pytest.mark.parametrize(("seed", "pieces"), [(1, 1), (2, 3)])
def test_no_acknowledged_push_is_lost_and_none_is_there_twice(
    crew: Callable[[int], Crew], seed: int, pieces: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert crew(2).run(_killed_shards, seed, pieces) == [(2 * STEPS, STEPS)] * 2


def _alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(bootstrap.REPLICATE, "1")
        model = Counting(1)
        with pytest.raises(SettingError, match="a copy of each shard needs two shards"):
            offbeat.attach(model, counting_optimizer(model), ASP(), timeout_s=HANG_S)


def test_one_shard_has_no_second(crew: Callable[[int], Crew]) -> None:
    crew(1).run(_alone)


def test_a_server_of_one_shard_is_refused(serve: Any, tmp_path: Path) -> None:
    served = serve("--workers", "1", "--shards", "1", "--replicate", "--snapshots", str(tmp_path))
    assert served.end() != 0
    assert "a copy of each shard needs two shards" in " ".join(served.said.split())


# --- by hand


class Other:
    """A second, by hand: it acknowledges what it is told to."""

    def __init__(self, shard: ShardServer) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._config = shard.config
        SignedStore(shard.store, TOKEN).set("address/1", f"plain {self._listener.getsockname()[1]} 127.0.0.1")

    def accept(self) -> None:
        """Receive the whole state."""
        self.link = Connection(self._listener.accept()[0], HANG_S)
        self.link.limit(HANG_S)
        assert challenge(self.link, TOKEN)
        kind, self.identity, count, _ = read_header(self.link, FROM_SHARDS)
        assert kind is MessageType.COPY
        self.state = receive_state(self.link, count, self._config)
        self.acknowledge(0)

    def receive(self) -> tuple[int, Effect]:
        kind, what, count, number = read_header(self.link, FROM_SHARDS)
        assert kind is MessageType.EFFECT
        return number, receive_effect(self.link, what, count, self._config.buffers(), 0)

    def acknowledge(self, number: int) -> None:
        self.link.send(encode_header(MessageType.EFFECT_ACK, number))

    def close(self) -> None:
        self.link.close()
        self._listener.close()


def test_a_push_is_acknowledged_when_its_copy_is_kept_or_there_is_none(tmp_path: Path) -> None:
    config = replace(beside.post(tmp_path, SIZES), second=1, follows={"sizes": SIZES, "optimizer": None})
    shard = ShardServer(config, dist.HashStore(), TOKEN)
    other = Other(shard)
    hand = Hand(shard, 0)
    hand.say(MessageType.LOAD, *of(5.0))
    other.accept()
    assert hand.hear()[0] == MessageType.PUSH_ACK
    assert [part.tolist() for part in other.state.weights] == [part.tolist() for part in of(5.0)]
    signed = SignedStore(shard.store, TOKEN)
    assert signed.get("copy/0") == str(other.identity)
    hand.say(MessageType.PUSH, 1, *of(1.0))
    number, effect = other.receive()
    assert (effect.kind, effect.clocks) == (EffectKind.APPLY, {0: 1})
    assert not select.select([hand.link.fileno()], [], [], SOON_S)[0], "nobody else has it yet"
    other.acknowledge(number)
    assert hand.hear()[:2] == [MessageType.PUSH_ACK, 1]
    hand.say(MessageType.PUSH, 2, *of(1.0))
    other.receive()
    other.close()  # without an acknowledgement: the shard serves on
    assert hand.hear()[:2] == [MessageType.PUSH_ACK, 2]
    assert signed.get("copy/0") == "0", "and a shard that is started again does not ask for what is old"
    shard.second.end()
    hand.leave()
