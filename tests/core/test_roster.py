"""The roster of an epoch: read and written by all workers. Foreign texts are in test_membership.py."""

from __future__ import annotations

from offbeat.core import roster as module
from offbeat.core.roster import Roster


def test_roster_is_the_same_after_it_was_written_and_read() -> None:
    roster = Roster(3, ("a", "b"), ("c",), "why")
    assert Roster.from_text(roster.to_text()) == roster


def test_ranks_are_places_among_members_and_then_those_who_join() -> None:
    roster = Roster(3, ("d", "b"), ("c", "a"))
    assert [roster.everyone.index(name) for name in "dbca"] == [roster.ranks[name] for name in "dbca"]
    assert [*roster.ranks] == [*"dbca"]


def test_newcomers_follow_all_who_were_there() -> None:
    roster = Roster(3, ("a", "b"), ("c",))
    assert Roster.from_text(roster.text_with(("e", "d"))) == Roster(4, ("a", "b", "c"), ("e", "d"))


def test_thousand_workers_write_the_roster_with_newcomers_once() -> None:
    roster = Roster(3, tuple(f"w{number}" for number in range(50)))
    texts = [roster.text_with(("e",)) for _ in range(1000)]
    assert all(text is texts[0] for text in texts)
    assert roster.text_with(("f",)) != texts[0]


def test_thousand_workers_parse_a_roster_once(monkeypatch) -> None:
    """Else a death costs a virtual world N times N names."""
    parsed: list[str] = []
    read = module.read_json
    monkeypatch.setattr(module, "read_json", lambda text: parsed.append(text) or read(text))
    text = Roster(17, tuple(f"w{number}" for number in range(50))).to_text()
    rosters = [Roster.from_text(text) for _ in range(1000)]
    assert parsed == [text]
    assert all(roster.everyone is rosters[0].everyone for roster in rosters)
