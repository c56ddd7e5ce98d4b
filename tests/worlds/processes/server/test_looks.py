"""A look holds the others still, at a real shard and by hand; what they owe for it, and how they pay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from offbeat.worlds.processes.server import shard as serving
from offbeat.worlds.processes.server.looks import Debt, Looks
from offbeat.worlds.processes.server.shard import ShardServer
from offbeat.worlds.processes.server.wire import HEADER, NOW, MessageType
from tests.support.limits import HANG_S
from tests.support.shards import Hand, of, shard_of
from tests.support.waiting import until

pytestmark = pytest.mark.processes


@dataclass
class Session:
    """A worker that waits for its answer."""

    worker: int
    goes_on: bool = True
    answered: bool = True
    looked_s: float = 0.0
    asked_s: float = 0.0
    busy_s: float = 0.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _looks() -> tuple[Looks, Clock]:
    clock = Clock()
    return Looks(clock), clock


# --- how long a look was, and who owes it


def test_a_look_holds_all_others_and_only_what_they_train_on_with() -> None:
    looks, _ = _looks()
    assert looks.admit(Session(1))
    looks.begin("link", 0, 0.0)
    assert [looks.admit(Session(worker)) for worker in (0, 1, 2)] == [True, False, False]
    assert looks.admit(Session(1, goes_on=False)), "a push, which others may wait for"
    looks.end("link")
    assert looks.admit(Session(1)) and not looks.admit(Session(1, answered=False))


def test_others_owe_the_whole_look_once_it_is_over_and_once() -> None:
    looks, clock = _looks()
    session = Session(1)
    looks.begin("link", 0, 2.0)  # the word took two seconds to come
    clock.now_s += 5
    looks.note_wait(session)
    looks.note_answer(session)
    assert looks.tell(session) == (0.0, 0.0), "it is not over"
    clock.now_s += 1
    looks.end("link")
    clock.now_s += 9
    assert looks.tell(session) == (8.0, 0.0)
    assert looks.tell(session) == (0.0, 0.0)
    looker = Session(0)
    looks.forgive(looker)
    assert looks.tell(looker) == (0.0, 0.0), "its own clock stood"


def test_who_waits_for_one_that_has_not_stopped_yet_waits_indeed() -> None:
    looks, clock = _looks()
    session = Session(1)
    looks.note_wait(session)
    looks.begin("link", 0, 0.0)
    clock.now_s += 3
    looks.note_answer(session)  # the other one's push let it go
    clock.now_s += 4
    looks.end("link")
    assert looks.tell(session) == (7.0, 3.0)


def test_looks_at_one_time_count_once() -> None:
    looks, clock = _looks()
    looks.begin("a", 0, 0.0)
    clock.now_s += 2
    looks.begin("b", 1, 1.0)
    assert not looks.admit(Session(0)) and not looks.admit(Session(1)), "each is held by the other"
    clock.now_s += 2
    looks.end("a")
    assert looks.admit(Session(1)) and not looks.admit(Session(0))
    clock.now_s += 2
    looks.end("b")
    clock.now_s += 1
    looks.begin("c", 0, 50.0)  # it says to have begun before the last one ended
    assert looks.seconds == 6 + 1
    assert looks.training_s(clock.now_s) == 100


def test_debt_is_paid_by_standing_still_and_the_rest_by_a_pause() -> None:
    debt = Debt(2)
    assert debt.settle([(0.0, 0.0), (0.0, 0.0)], 5.0) == (0.0, 0.0), "it waited for others"
    assert debt.settle([(8.0, 0.0), (7.0, 0.0)], 5.0) == (5.0, 3.0), "shards tell of the same look"
    assert debt.settle([(0.0, 0.0), (1.0, 0.0)], 5.0) == (0.0, 0.0), "one of them later"
    assert debt.settle([(8.0, 3.0), (8.0, 0.0)], 9.0) == (5.0, 3.0), "for three seconds it did wait for one"
    assert debt.settle([(2.0, 0.0), (2.0, 0.0)], 9.0) == (2.0, 0.0)


# --- at a shard


def _kinds(hand: Hand, last: MessageType) -> list[list[int]]:
    """Hear messages up to one of a kind; return those that are no WAITING."""
    heard: list[list[int]] = []
    while not heard or heard[-1][0] != last:
        head = torch.zeros(HEADER, dtype=torch.int64)
        hand.link.receive(head)
        if head[0] != MessageType.WAITING or last is MessageType.WAITING:
            heard.append(head.tolist())
    return heard


def _crew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str = "asp"
) -> tuple[ShardServer, list[Hand]]:
    monkeypatch.setattr(serving, "CHECK_S", 0.05)  # tells soon who waits
    shard = shard_of(folder, strategy, workers=2)
    hands = [Hand(shard, worker) for worker in (0, 1)]
    hands[0].ask(MessageType.LOAD, *of(0.0))
    return shard, hands


def _looker(shard: ShardServer) -> Hand:
    looker = Hand(shard, 0, clock=None)
    assert looker.ask(MessageType.LOOK, 0, 0)[0] == [MessageType.JOIN_ACK, 0, 0, 0]
    return looker


def test_nobody_goes_on_until_the_look_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, hands = _crew(tmp_path, monkeypatch)
    looker = _looker(shard)
    assert hands[1].ask(MessageType.PUSH, 1, *of(0.5))[0] == [MessageType.PUSH_ACK, 1, 0, 0]
    hands[1].say(MessageType.PULL, 1)
    assert _kinds(hands[1], MessageType.WAITING)[-1][1] == 0, "it is told for whom it waits"
    assert hands[0].ask(MessageType.PULL, NOW)[0][0] == MessageType.PULL_REPLY, "the looker is not held"
    looker.link.close()  # as when its process is killed
    looked, reply = _kinds(hands[1], MessageType.PULL_REPLY)
    assert (looked[0], reply[0]) == (MessageType.LOOKED, MessageType.PULL_REPLY)
    hands[1].link.receive(*of(0.0))
    assert looked[1] == pytest.approx(1e9 * shard.looks.seconds, abs=1)
    assert hands[1].ask(MessageType.PULL, 1)[0][0] == MessageType.PULL_REPLY, "and owes nothing more"
    assert hands[0].ask(MessageType.PULL, NOW)[0][0] == MessageType.PULL_REPLY, "nor does the looker"
    for hand in hands:
        hand.leave()


def test_who_looks_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, hands = _crew(tmp_path, monkeypatch)
    looker = _looker(shard)
    with shard.changed:
        shard.sessions[0].heard_s -= 2 * shard.config.silence_s
        shard.remove_silent(waiting=1)
        assert sorted(shard.sessions) == [0, 1]
    looker.link.close()
    looker.served.result(HANG_S)
    with shard.changed:
        shard.remove_silent(waiting=1)
        assert sorted(shard.sessions) == [0, 1], "its silence counts from the end of the look"
    for hand in hands:
        hand.leave()


def test_one_that_is_held_and_hangs_up_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, hands = _crew(tmp_path, monkeypatch)
    looker = _looker(shard)
    hands[1].ask(MessageType.PUSH, 1, *of(0.5))
    hands[1].say(MessageType.PULL, 1)
    _kinds(hands[1], MessageType.WAITING)
    hands[1].link.close()
    until(lambda: 1 not in shard.sessions)
    assert shard.looks.of(0)
    looker.link.close()
    hands[0].leave()


def test_a_rule_that_needs_the_time_has_none_for_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time at which pushes arrive is that of training."""
    shard, hands = _crew(tmp_path, monkeypatch, "dssp")
    for hand in hands:
        hand.ask(MessageType.PUSH, 1, *of(0.0))
        hand.ask(MessageType.PULL, 1)
    shard.looks._ended_s = 1000.0  # as if one had looked for so long
    hands[0].say(MessageType.PUSH, 2, *of(0.0))
    looked, _ = _kinds(hands[0], MessageType.PUSH_ACK)
    assert looked[1] == 1e12
    hands[0].ask(MessageType.PULL, 2)
    before_s, after_s = shard.server.state.times[0]
    assert after_s < before_s, "though it came later"
    for hand in hands:
        hand.leave()
