"""Oscars' rounds, message by message: no network, no clock but what messages tell."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offbeat import Oscars
from offbeat.server.messages import Join, JoinAck, Leave, Pull, PullReply, Push, PushAck, Tick
from offbeat.server.server import ParameterServer
from offbeat.server.sharding import ShardState
from offbeat.worlds.processes.server.shard import ShardServer
from tests.support.beside import post
from tests.support.oscars_stage import Stage


def test_a_round_ends_when_all_have_pushed_and_not_before() -> None:
    stage = Stage(3)
    assert stage.step(1, 3.0) == {}
    assert stage.step(0, 6.0) == {}
    assert stage.weight == 0
    assert stage.server.applied_clocks == {0: 0, 1: 0, 2: 0}, "what is gathered is not in the weights"
    assert stage.step(2, 9.0) == {0: 1, 1: 1, 2: 1}
    assert stage.weight == 6.0
    assert stage.server.applied_clocks == {0: 1, 1: 1, 2: 1}


def test_updates_count_by_samples() -> None:
    stage = Stage(3)
    stage.step(0, 1.0, samples=10)
    stage.step(1, 2.0, samples=30)
    stage.step(2, 4.0, samples=60)
    assert stage.weight == pytest.approx((10 * 1 + 30 * 2 + 60 * 4) / 100, rel=1e-6)


def test_or_all_alike() -> None:
    stage = Stage(2, weighted=False)
    stage.step(0, 1.0, samples=10)
    stage.step(1, 2.0, samples=30)
    assert stage.weight == 1.5


def test_normalised_as_fednova() -> None:
    """Workers push δ_i/H_i: 0.5 of 4 steps and 1 of 2, of one sample a step: p = 1/2, mean H = 3."""
    stage = Stage(2, normalise=True)
    stage.step(0, 0.5, samples=4, steps=4)
    stage.step(1, 1.0, samples=2, steps=2)
    assert stage.weight == pytest.approx(0.75 * 3)


def planned(stage: Stage, *step_s: float) -> dict[int, int]:
    """A round of nothing, after which the server knows how fast all are. It ends at 100 s."""
    let_on: dict[int, int] = {}
    for worker, seconds in enumerate(step_s):
        let_on = stage.step(worker, 0.0, step_s=seconds, at_s=100.0)
    return let_on


def test_all_are_told_their_steps() -> None:
    assert planned(Stage(4), 0.1, 0.1, 0.2, 0.4) == {0: 16, 1: 16, 2: 8, 3: 4}


def test_a_round_ends_at_its_deadline_and_who_is_late_counts_less_in_the_next() -> None:
    """T is 4 s: the deadline is at 104.8 s."""
    stage = Stage(3)
    planned(stage, 1.0, 1.0, 1.0)
    assert stage.server.aggregation.wake_at(stage.server.state) == pytest.approx(104.8)
    assert stage.step(0, 2.0, at_s=104.0) == stage.step(1, 4.0, at_s=104.0) == {}
    assert stage.server.handle(Tick(at_s=104.5)) == []
    assert stage.server.handle(Tick(at_s=104.8)) == [PullReply(worker=0, hint=4), PullReply(worker=1, hint=4)]
    assert stage.weight == 3.0
    assert stage.server.aggregation.wake_at(stage.server.state) == pytest.approx(109.6), "of the next round"
    assert stage.step(2, 9.0, at_s=106.0) == {}, "it waits for the next round, like anybody"
    assert stage.step(0, 0.0, at_s=108.0) == {}
    answers = stage.push(1, 0.0, at_s=108.0) + stage.ask(1)
    assert answers == [PullReply(worker=w, hint=4, staleness=1) for w in (2, 0, 1)], (
        "two whole, and half of one"
    )
    assert stage.weight == pytest.approx(3.0 + 0.5 * 9.0 / 2.5)
    assert stage.step(2, 0.0, at_s=109.0) == stage.step(0, 0.0, at_s=109.0) == {}, "all are waited for again"


@pytest.mark.parametrize("lateness", [0, 1, 3])
def test_what_is_too_late_is_dropped_and_its_worker_reads_anew(lateness: int) -> None:
    stage = Stage(2, lateness=lateness)
    planned(stage, 1.0, 1.0)
    now_s = 100.0
    for _ in range(lateness + 1):
        now_s += 10
        assert stage.step(0, 1.0, at_s=now_s) == {0: 4}, "overdue"
    weight = stage.weight
    receipt, *others = stage.push(1, 64.0, at_s=now_s + 1)
    assert isinstance(receipt, PushAck) and "arrived too late" in receipt.refused and not others
    assert stage.ask(1) == []
    assert stage.step(0, 1.0, at_s=now_s + 4) == {0: 4, 1: 4}
    assert stage.weight == weight + 1.0
    assert stage.server.refused == {1: 1}


def test_as_late_as_allowed_it_counts() -> None:
    stage = Stage(2, lateness=2)
    planned(stage, 1.0, 1.0)
    for now_s in (110.0, 120.0):
        stage.step(0, 0.0, at_s=now_s)
    assert stage.step(1, 8.0, at_s=121.0) == {}
    assert stage.step(0, 0.0, at_s=124.0) == {0: 4, 1: 4}
    assert stage.weight == pytest.approx(8 / 3 / (1 + 1 / 3))


def test_what_is_late_is_a_smaller_part_by_samples_too() -> None:
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    stage.step(0, 0.0, at_s=110.0)
    stage.step(1, 6.0, samples=40, at_s=111.0)
    stage.step(0, 3.0, samples=40, at_s=112.0)
    assert stage.weight == pytest.approx((40 * 3 + 20 * 6) / 60)


def test_a_deadline_counts_from_when_a_worker_began() -> None:
    """It waited for another shard until 103 s, and says so: the round of 4 s ends by 107.8 s, not 104.8."""
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    assert stage.step(0, 2.0, at_s=107.0, spent_s=4.0) == {}, "overdue by this shard's own deadline"
    assert stage.server.aggregation.wake_at(stage.server.state) == pytest.approx(107.8)
    assert stage.step(1, 4.0, at_s=107.5, spent_s=4.5) == {0: 4, 1: 4}, "in the same round"
    assert stage.weight == 3.0


def test_its_exchange_is_a_part_of_the_round() -> None:
    stage = Stage(2)
    for worker in (0, 1):
        stage.step(worker, 0.0, step_s=1.0, exchange_s=0.5, at_s=100.0)
    stage.push(0, 2.0, at_s=107.0, spent_s=4.0, exchange_s=0.5)
    assert stage.server.aggregation.wake_at(stage.server.state) == pytest.approx(102.5 + 1.2 * 4.5)


def test_the_late_do_not_end_a_round_from_which_all_others_are_missing() -> None:
    """Worker 2 was late, and pushes again early in the next round. Its deadline, at 109.6 s, passes without
    the others, for whom it waits for T = 4 s more. Then it goes on, with one step: three of its four did not
    fit any more when it came, at 107.8 s. The others are still waited for."""
    stage = Stage(3)
    planned(stage, 1.0, 1.0, 1.0)
    stage.step(0, 0.0, at_s=104.0), stage.step(1, 0.0, at_s=104.0)
    stage.server.handle(Tick(at_s=104.8))
    assert stage.step(2, 8.0, at_s=107.8) == {}
    assert stage.server.handle(Tick(at_s=109.6)) == stage.server.handle(Tick(at_s=113.5)) == []
    assert stage.server.handle(Tick(at_s=113.6)) == [PullReply(worker=2, hint=1, staleness=1)]
    assert stage.weight == 8.0
    assert stage.step(2, 0.0, at_s=114.6) == stage.step(1, 0.0, at_s=115.0) == {}
    assert stage.step(0, 0.0, at_s=115.0) == {0: 4, 1: 4, 2: 4}, "all in one round again"


def test_one_who_dies_does_not_stop_a_round() -> None:
    stage = Stage(3)
    assert stage.step(0, 2.0) == stage.step(1, 4.0) == {}
    answers = stage.server.handle(Leave(worker=2, at_s=7.0))
    assert answers == [PullReply(worker=0, hint=1), PullReply(worker=1, hint=1)]
    assert stage.weight == 3.0
    assert stage.step(0, 0.0) == {} and stage.step(1, 0.0) == {0: 1, 1: 1}, "nor the next"


def test_whoever_has_pushed_by_the_deadline_is_let_on_when_it_asks() -> None:
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    stage.push(0, 2.0, at_s=104.0)
    assert stage.server.handle(Tick(at_s=105.0)) == []
    assert stage.weight == 2.0
    assert stage.ask(0) == [PullReply(worker=0, hint=4)]


def test_one_who_dies_in_silence_stops_it_until_the_deadline() -> None:
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    assert stage.step(0, 2.0, at_s=104.0) == {}
    assert stage.server.handle(Tick(at_s=105.0)) == [PullReply(worker=0, hint=4)]
    assert stage.step(0, 2.0, at_s=109.0) == {0: 4}, "in the next round nobody waits for it"


def test_what_the_dead_have_pushed_stays() -> None:
    stage = Stage(2)
    stage.push(1, 4.0)
    stage.server.handle(Leave(worker=1))
    assert stage.weight == 0
    assert stage.step(0, 2.0) == {0: 1}
    assert stage.weight == 3.0
    assert stage.step(0, 5.0) == {0: 1}
    assert stage.weight == 8.0, "alone, a round is over when it asks"


def test_a_newcomer_holds_nobody_up_and_is_taken_for_the_slowest_until_it_is_timed() -> None:
    """Of a round of 8 s from 108 s on, in which the slowest does 4 steps, 7 s are left after its first."""
    stage = Stage(2)
    planned(stage, 1.0, 2.0)
    stage.clocks[2] = 1
    assert stage.server.handle(Join(worker=2)) == [JoinAck(worker=2, clock=1)]
    assert stage.step(0, 0.0, at_s=108.0) == {}
    assert stage.step(1, 0.0, at_s=108.0) == {0: 8, 1: 4}, "without it"
    assert stage.step(2, 9.0, at_s=109.0) == {2: 3}, "at once, as many as fit"
    assert stage.step(0, 0.0, at_s=116.0) == {}
    assert stage.step(1, 0.0, at_s=116.0) == {0: 8, 1: 4}, "nobody waits for it"
    assert stage.weight == pytest.approx(4.5 / 2.5), "its first push came a round late: half"
    assert stage.step(2, 0.0, at_s=117.0) == {}, "it was late, and waits for the next round"
    assert stage.step(0, 0.0, at_s=124.0) == {}
    assert stage.step(1, 0.0, at_s=124.0) == {0: 8, 1: 4, 2: 4}, "not timed yet"
    assert stage.step(0, 0.0, at_s=132.0) == stage.step(1, 0.0, at_s=132.0) == {}, "now it is waited for"
    assert stage.step(2, 0.0, step_s=0.5, at_s=132.5) == {0: 8, 1: 4, 2: 16}


def test_one_who_takes_the_place_of_a_lost_worker_is_planned_with_its_pace() -> None:
    """Until it is timed: three rounds of one step each would leave it idle for most of them."""
    stage = Stage(2)
    planned(stage, 1.0, 0.5)
    stage.server.handle(Leave(worker=1, at_s=101.0))
    stage.server.handle(Join(worker=1))
    assert stage.step(0, 0.0, at_s=104.0) == {0: 4}, "nobody waits for its first step"
    assert stage.step(1, 0.0, step_s=0.0, at_s=105.0) == {1: 6}, "three quarters of eight"
    assert stage.step(1, 0.0, step_s=0.0, at_s=108.0) == {}
    assert stage.step(0, 0.0, at_s=108.0) == {0: 4, 1: 8}
    assert stage.step(0, 0.0, at_s=112.0) == {}, "it is waited for"
    assert stage.step(1, 0.0, step_s=2.0, at_s=112.5) == {0: 8, 1: 4}, "it is slower"


def test_a_newcomer_that_comes_when_no_step_fits_waits_for_the_next_round() -> None:
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    stage.clocks[2] = 1
    stage.server.handle(Join(worker=2))
    assert stage.step(2, 0.0, at_s=103.5) == stage.step(0, 0.0, at_s=104.0) == {}
    assert stage.step(1, 0.0, at_s=104.0) == {2: 4, 0: 4, 1: 4}


def test_of_two_pushes_in_one_round_none_is_in_the_weights_before_its_end() -> None:
    """A crash would lose both, and must say so."""
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    stage.clocks[2] = 1
    stage.server.handle(Join(worker=2))
    assert stage.step(2, 3.0, at_s=101.0) == {2: 3}
    stage.step(2, 3.0, at_s=104.0)
    assert stage.clocks[2] == 3 and stage.server.applied_clocks[2] == 1
    copy = ShardState([], dict(stage.server.applied_clocks))
    again = ParameterServer(ShardState([torch.zeros(1)], copy.applied), Oscars().server_half())
    assert again.handle(Join(worker=2, clock=3)) == [JoinAck(worker=2, clock=3, lost=2)]
    stage.step(0, 0.0, at_s=104.0), stage.step(1, 0.0, at_s=104.0)
    assert stage.server.applied_clocks[2] == 3


def test_one_whose_link_broke_is_still_in_its_round() -> None:
    stage = Stage(2)
    planned(stage, 1.0, 1.0)
    stage.server.handle(Leave(worker=1, at_s=101.0))
    assert stage.server.handle(Join(worker=1, clock=1)) == [JoinAck(worker=1, clock=1)]
    assert stage.step(0, 2.0, at_s=103.0) == {}
    assert stage.step(1, 4.0, at_s=104.0) == {0: 4, 1: 4}
    assert stage.weight == 3.0


def test_one_who_was_away_for_too_long_knows_which_weights_it_has() -> None:
    stage = Stage(2, lateness=0)
    planned(stage, 1.0, 1.0)
    stage.server.handle(Leave(worker=1, at_s=101.0))
    assert stage.step(0, 2.0, at_s=103.0) == {0: 4}
    stage.server.handle(Join(worker=1, clock=1))
    assert stage.push(1, 50.0, at_s=104.0)[0].refused  # type: ignore[union-attr]
    assert stage.weight == 2.0


def test_one_who_returns_as_a_round_ends_has_the_weights_that_it_then_reads() -> None:
    stage = Stage(2, lateness=0)
    for worker in (0, 1):
        stage.step(worker, 1.0, step_s=0.1)
    stage.step(0, 1.0, at_s=0.1, step_s=0.1)
    stage.server.handle(Leave(worker=0, at_s=5.0))  # past the deadline: the round ends without it
    assert stage.weight == 2.0
    stage.server.handle(Join(worker=0, clock=stage.clocks[0]))
    assert len(stage.ask(0)) == 1
    stage.step(0, 3.0, at_s=6.0, step_s=0.1)
    stage.server.handle(Tick(at_s=100.0))
    assert stage.weight == 5.0


def test_one_whose_push_was_lost_in_a_crash_is_let_on() -> None:
    """It had pushed, and asks; the server that is started again knows of neither."""
    server = ParameterServer(ShardState([torch.zeros(1)], {0: 4, 1: 4}), Oscars().server_half())
    assert server.handle(Join(worker=0, clock=5)) == [JoinAck(worker=0, clock=5, lost=1)]
    assert server.handle(Pull(worker=0, clock=5)) == [PullReply(worker=0, hint=1)]


def test_what_is_not_finite_ends_a_round_too_and_changes_nothing() -> None:
    stage = Stage(2, normalise=True)
    stage.step(0, 2.0, steps=3)
    receipt, *_ = stage.push(1, math.nan, step_s=1.0)
    assert isinstance(receipt, PushAck) and "not finite" in receipt.refused
    assert stage.ask(1) == [PullReply(worker=0, hint=1), PullReply(worker=1, hint=1)]
    assert stage.weight == 6.0
    assert not stage.server.state.paces


def test_starting_again_forgets_what_was_gathered() -> None:
    stage = Stage(2)
    stage.step(0, 8.0)
    stage.server.restart(stage.server.weights)
    stage.clocks = {0: 0, 1: 0}
    stage.step(0, 2.0)
    stage.step(1, 4.0)
    assert stage.weight == 3.0


def test_a_snapshot_says_what_is_in_its_weights(tmp_path: Path) -> None:
    """After a crash, what was only gathered is reported lost."""
    shard = ShardServer(post(tmp_path, [("float32", 1)], "oscars", workers=2), dist.HashStore(), b"")
    copy = ShardState([])
    with shard.changed:
        for worker in (0, 1):
            shard.dispatch(Join(worker=worker))
    for worker in (0, 1):
        shard._copy_state(copy)
        assert copy.applied == {0: 0, 1: 0}
        assert not copy.weights[0].any()
        with shard.changed:
            told, figures = [torch.full((1,), 3.0)], (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
            shard.dispatch(Push(worker=worker, clock=1, update=told, report=figures))
            shard.dispatch(Pull(worker=worker, clock=1))
    shard._copy_state(copy)
    assert copy.applied == {0: 1, 1: 1}
    assert (copy.weights[0] == 3).all()


def test_looking_does_not_end_a_round_nor_wait_for_one() -> None:
    stage = Stage(2)
    assert stage.step(0, 8.0) == {}
    assert stage.server.handle(Pull(worker=1, clock=None)) == [PullReply(worker=1, hint=1)]
    assert stage.weight == 0


def test_losses_move_tau() -> None:
    stage = Stage(2, schedule="lengthen")
    stage.step(0, 0.0, step_s=1.0, losses=(2.0, 8.0), samples=30)
    let_on = stage.step(1, 0.0, step_s=1.0, losses=(6.0, 27.0), samples=10)
    assert let_on == {0: 9, 1: 9}, "the mean by samples is 3, the greatest first loss 27: ⌈9^(1/3)·4⌉"


def test_a_loss_that_is_not_told_does_not_count() -> None:
    stage = Stage(2, schedule="lengthen")
    stage.step(0, 0.0, step_s=1.0, losses=(1.0, 8.0), samples=30)
    assert stage.step(1, 0.0, step_s=1.0, losses=(0.0, 0.0), samples=10) == {0: 8, 1: 8}
