"""Membership under thousands of schedules of deaths, hangs, wrong suspicions, failures and newcomers."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.membership import Requests, _some_of, read_decision, read_number
from offbeat.core.pending import block_on
from offbeat.core.roster import Roster
from offbeat.errors import OffbeatError
from tests.support.membership import Committed, Fault, MemoryRegistry, Stage

SCHEDULES = 1000
ROUNDS = 7
KINDS = ["kill", "hang", "resume", "suspect", "trust", "join", "break", "tire"]

seeds = st.integers(0, 10**9)


def faults(kinds: list[str], most: int):
    fault = st.builds(Fault, st.integers(0, 900), st.sampled_from(kinds), st.integers(0, 5))
    return st.lists(fault, max_size=most)


def staged(founders: int, minimum: int, seed: int, happening: list[Fault]) -> Stage:
    stage = Stage(ROUNDS, founders, minimum)
    for _ in range(founders):
        stage.add_worker()
    stage.run(seed, happening)
    return stage


def check_safety(stage: Stage) -> None:
    """No split brain, no minority, nothing twice, and newcomers have what the others have."""
    outcomes: dict[str, set[Committed]] = defaultdict(set)
    for worker in stage.workers:
        own = [entry.exchange for entry in worker.log]
        assert len(own) == len(set(own)), f"{worker.name} has a result twice: {own}"
        for entry in worker.log:
            outcomes[entry.exchange].add(entry)
            assert len(entry.roster) >= stage.minimum
            assert set(entry.parts) == {entry.exchange}, f"other exchanges were mixed: {entry}"
    split = {exchange: found for exchange, found in outcomes.items() if len(found) > 1}
    assert not split, f"committed by two rosters: {split}"
    finished = [worker for worker in stage.workers if worker.ended and worker.error is None]
    assert all(sorted(worker.log) == sorted(finished[0].log) for worker in finished)
    for worker in finished:
        assert worker.clock == stage.rounds
        assert len(worker.log) == 2 * stage.rounds + (stage.rounds + 1) // 2


@given(seeds, st.integers(1, 5), st.integers(1, 3), faults(KINDS, 8))
@settings(max_examples=SCHEDULES)
def test_whatever_happens_nothing_is_split_or_counted_twice(seed, founders, minimum, happening) -> None:
    check_safety(staged(founders, min(minimum, founders), seed, happening))


@given(seeds, st.integers(2, 5), faults(["kill", "join", "break"], 6))
@settings(max_examples=SCHEDULES)
def test_training_ends_wherever_enough_workers_live(seed, founders, happening) -> None:
    stage = staged(founders, 1, seed, happening)
    check_safety(stage)
    assert any(w.ended and w.error is None for w in stage.workers) or _all_with_the_state_died(stage)


def _all_with_the_state_died(stage: Stage) -> bool:
    """The others then have nobody to get the state from, and say so."""
    errors = [str(worker.error) for worker in stage.workers if worker.name not in stage.dead]
    return all("all workers of the last roster" in error for error in errors)


@given(seeds, st.integers(2, 5))
@settings(max_examples=50)
def test_without_faults_there_is_one_epoch(seed, founders) -> None:
    stage = staged(founders, 1, seed, [])
    check_safety(stage)
    assert all(worker.member.roster.epoch == 1 and worker.error is None for worker in stage.workers)


@given(seeds, st.integers(150, 400))
@settings(max_examples=40)
def test_newcomer_is_admitted_and_has_the_state_of_the_others(seed, at) -> None:
    stage = Stage(ROUNDS + 60, 3, 1)
    for _ in range(3):
        stage.add_worker()
    stage.run(seed, [Fault(at, "join", 0)])
    check_safety(stage)
    newcomer = stage.workers[3]
    assert newcomer.error is None
    assert newcomer.member.world == 4
    assert newcomer.log == stage.workers[0].log
    assert 0 < newcomer.joined_at < stage.rounds


@given(seeds, st.integers(150, 400))
@settings(max_examples=100)
def test_minority_stops_with_an_error_in_words(seed, at) -> None:
    """Of 4 workers that must be 3, two die before the last round; the two that are left stop."""
    stage = Stage(ROUNDS + 60, 4, 3)
    for _ in range(4):
        stage.add_worker()
    stage.run(seed, [Fault(at, "kill", 0), Fault(at, "kill", 1)])
    check_safety(stage)
    for worker in stage.workers[2:]:
        assert "2 of 4 workers are left (w2, w3), but at least 3 must be" in str(worker.error)


@given(seeds, st.integers(150, 400))
@settings(max_examples=40)
def test_dropped_worker_commits_nothing_more_and_comes_back(seed, at) -> None:
    """It hangs, the others go on without it, it resumes: refused in its old epoch, and admitted anew."""
    stage = Stage(ROUNDS + 200, 3, 1)
    for _ in range(3):
        stage.add_worker()
    stage.run(
        seed, [Fault(at, "hang", 1), Fault(at, "suspect", 1), Fault(at + 500, "resume", 1)], calm_at=at + 800
    )
    check_safety(stage)
    dropped, back = stage.workers[1], stage.workers[3]
    assert "the others went on without it" in str(dropped.error)
    assert back.error is None
    assert back.member.world == 3


@given(seeds, st.integers(150, 400), st.sampled_from([0, 1]))
@settings(max_examples=40)
def test_stuck_worker_is_dropped_though_its_heart_beats(seed, at, stuck) -> None:
    """The others lose patience twice: in their exchange, and when it does not come to the next epoch.

    If the first of the roster is stuck, the next one writes the roster.
    """
    stage = Stage(ROUNDS + 200, 3, 1)
    for _ in range(3):
        stage.add_worker()
    tired = [Fault(at + 100 * n, "tire", 0) for n in range(1, 6)]
    tired += [Fault(at + 100 * n, "tire", 2) for n in range(1, 6) if not stuck]
    faults = [Fault(at, "hang", stuck), *tired, Fault(at + 800, "resume", stuck)]
    stage.run(seed, faults, calm_at=at + 1200)
    check_safety(stage)
    dropped, back = stage.workers[stuck], stage.workers[3]
    assert "could not be waited for, so the others went on without it" in str(dropped.error)
    assert back.error is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@given(st.text(max_size=30) | json_values.map(json.dumps))
@settings(max_examples=SCHEDULES)
def test_text_that_no_worker_wrote_is_refused_in_words(text) -> None:
    """Whoever reaches the store may write anything there; it must not come out as a raw error of a parser."""
    for read in (Roster.from_text, read_decision, read_number):
        try:
            read(text)
        except OffbeatError as refused:
            assert "somebody else has written to the store" in str(refused)


@pytest.mark.parametrize(
    "text",
    [
        '{"epoch": 1, "members": ["a", 2], "joining": [], "stopped": ""}',
        '{"epoch": -1, "members": ["a"], "joining": [], "stopped": ""}',
        '{"epoch": 1, "members": "ab", "joining": [], "stopped": ""}',
        '["commit", ["a", 1]]',
        '["maybe", []]',
        "[" * 100_000,
    ],
)
def test_text_of_the_wrong_kind_is_no_roster_and_no_decision(text) -> None:
    for read in (Roster.from_text, read_decision):
        with pytest.raises(OffbeatError, match="somebody else has written"):
            read(text)


def test_thousand_workers_parse_a_decision_once() -> None:
    """Else a commit that admits many costs a virtual world as many names for each worker."""
    text = '["commit", ["a", "b"]]'
    read = [read_decision(text) for _ in range(1000)]
    assert read[0] == ("commit", ("a", "b")) and all(each is read[0] for each in read)


def test_look_at_requests_reads_no_more_after_many_workers_have_joined_or_died() -> None:
    """Else every look at the store costs a call for each worker that has ever come."""
    registry = MemoryRegistry()
    requests = Requests(registry)
    read: list[str] = []
    get, registry.get = registry.get, lambda key: read.append(key) or get(key)
    for number in range(1, 501):
        registry.counts["requests"] = number
        registry.texts[f"request/{number}"] = f"w{number}"
        gone = {f"w{number}"} if number % 2 else set()
        assert block_on(requests.names(gone)) == [f"w{number}"]
        if not gone:
            registry.texts[f"request/{number}"] = ""  # it has joined
        block_on(requests.names())
    assert len(read) == 500 + 250  # each once, and those who joined once more


def test_request_that_is_about_to_be_written_is_looked_at_again() -> None:
    registry = MemoryRegistry()
    requests = Requests(registry)
    registry.counts["requests"] = 2
    registry.texts["request/2"] = "second"
    assert block_on(requests.names()) == ["second"]
    registry.texts["request/1"] = "first"
    assert block_on(requests.names()) == ["first", "second"]


def test_an_error_names_some_of_many() -> None:
    names = [f"rank{rank}" for rank in range(1000)]
    assert _some_of(names) == "rank0, rank1, rank2, rank3, rank4, rank5, rank6, rank7, and 992 more"
    assert _some_of(names[:2]) == "rank0, rank1"
