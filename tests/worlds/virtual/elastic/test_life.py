"""What a hang, a cut and an end do to a process, and when others find out."""

from __future__ import annotations

import pytest

from offbeat.worlds.virtual.elastic.life import Life, VirtualDetector
from offbeat.worlds.virtual.elastic.registry import SharedRegistry, VirtualRegistry
from tests.support.lives import lives_of, run, work

pytestmark = pytest.mark.virtual


@pytest.mark.parametrize(
    ("hangs", "expected"),
    [
        ([], 5.0),
        ([(1.0, 0.5)], 5.5),  # over before the work ends
        ([(4.0, 3.0)], 8.0),  # while the work would have ended
        ([(4.0, 3.0), (7.5, 1.0)], 9.0),  # and again in what was left
        ([(5.5, 3.0)], 5.0),  # too late to matter
    ],
)
def test_work_takes_longer_by_as_long_as_its_process_hangs(
    hangs: list[tuple[float, float]], expected: float
) -> None:
    lives, (life,) = lives_of(1)
    ended: list[float] = []
    events = [(at, lambda seconds=seconds: life.hang(seconds)) for at, seconds in hangs]
    run(lives, work(life, 5.0, ended), *events)
    assert ended == [expected]


def test_silence_is_known_after_a_while_and_an_end_when_it_is_told() -> None:
    lives, (one, other) = lives_of(2)
    seen: dict[float, bool] = {}
    look = [1.4, 1.5, 2.9, 3.0, 6.0, 6.1]

    async def code() -> None:
        for time_s in look:
            await one.sleep(time_s)
            seen[time_s] = bool(one.lost_among([other]))

    run(lives, code(), (1.0, lambda: other.hang(3.0)), (5.6, lambda: other.end(0.5)))
    assert seen == {1.4: False, 1.5: False, 2.9: False, 3.0: True, 6.0: False, 6.1: True}


def test_one_that_was_stopped_itself_does_not_take_others_for_lost() -> None:
    """Both hang; the one that goes on first begins to count the other's silence then."""
    lives, (one, other) = lives_of(2)
    seen: list[bool] = []

    async def code() -> None:
        for time_s in (1.5, 5.9, 6.0):  # the first is reached at 4.5
            await one.sleep(time_s)
            seen.append(bool(one.lost_among([other])))

    run(lives, code(), (1.0, lambda: one.hang(3.0)), (1.0, lambda: other.hang(9.0)))
    assert seen == [False, False, True]


def test_patience_ends() -> None:
    lives, (life,) = lives_of(1)
    registry = VirtualRegistry(SharedRegistry(), life)
    detector = VirtualDetector(life, lives, registry)
    tired: list[float] = []

    async def code() -> None:
        for _ in range(2):
            detector.start_waiting()
            while not detector.impatient():
                await registry.pause()
            tired.append(life.now)
            await life.sleep(life.now + 1.0)

    run(lives, code())
    assert tired == [10.0, 21.0]


def test_lost_workers_are_told_in_the_order_of_the_names() -> None:
    """Who is suspected among names is found once, and anew when one more has ended."""
    lives, (one, *others) = lives_of(4)
    names = tuple(life.name for life in (others[2], one, others[0], others[1]))
    detector = VirtualDetector(one, lives, VirtualRegistry(SharedRegistry(), one))
    assert detector.lost(names) == []
    for ended, expected in [(others[1], names[3:]), (others[2], (names[0], names[3])), (one, None)]:
        ended.end()
        lives.announce(ended)
        assert expected is None or detector.lost(names) == [*expected]
    assert detector.lost(names) == [names[0], names[3]]  # never itself
    assert detector.lost(names[1:3]) == []


def test_only_those_who_asked_about_a_worker_wake_up_when_it_is_lost() -> None:
    lives, (one, other, third) = lives_of(3)
    woken: list[tuple[float, str]] = []

    async def wait(life: Life, names: list[str]) -> None:
        registry = VirtualRegistry(SharedRegistry(), life)
        detector = VirtualDetector(life, lives, registry)
        while not (lost := detector.lost(names)):
            await registry.pause()
            woken.append((life.now, life.name))
        assert lost == names[:1]

    def die(life: Life) -> None:
        life.end()
        lives.announce(life)

    lives.scheduler.spawn("other", wait(other, [one.name]))
    run(lives, wait(one, [third.name, other.name]), (2.0, lambda: die(third)), (3.0, lambda: die(one)))
    assert woken == [(2.0, one.name), (3.0, other.name)]


def test_those_who_asked_wake_in_the_order_in_which_they_began_and_are_forgotten() -> None:
    """About a roster or one worker, often or once: nobody else is looked at when somebody is lost."""
    lives, (dies, *others) = lives_of(5)
    everyone = tuple(life.name for life in (dies, *others))
    woken: list[str] = []

    async def wait(life: Life, asked: list[tuple[str, ...]], begins_s: float) -> None:
        registry = VirtualRegistry(SharedRegistry(), life)
        detector = VirtualDetector(life, lives, registry)
        await life.sleep(begins_s)
        for names in asked:
            detector.lost(names)
        await registry.pause()
        woken.append(life.name)

    def die() -> None:
        dies.end()
        lives.announce(dies)

    asked = [[everyone, everyone], [(dies.name,)], [everyone[2:]], [everyone, (dies.name,)]]
    for number, life in enumerate(others):
        lives.scheduler.spawn(life.name, wait(life, asked[number], 1.0 - number / 10))
    lives.scheduler.at(3.0, others[2].alarm.ring)
    run(lives, work(dies, 1.0, []), (2.0, die))
    assert woken == [everyone[1], everyone[2], everyone[4], everyone[3]]
    assert lives._inquiries.about(dies.name) == [], "whoever has woken up waits for nobody"


def test_one_that_has_ended_waits_for_nobody() -> None:
    lives, (one, other) = lives_of(2)
    detector = VirtualDetector(one, lives, VirtualRegistry(SharedRegistry(), one))
    detector.lost((one.name, other.name))
    assert lives._inquiries.about(other.name) == [one]
    one.end()
    lives.announce(one)
    assert lives._inquiries.about(other.name) == []
