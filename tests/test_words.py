"""Rules of language: how docstrings begin, and which words are no names of modules and classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import offbeat
from tests.support.source import Package

OFFBEAT = Package(Path(offbeat.__file__).parent)

# A docstring starts with a verb or a noun phrase: with no question word, no pronoun without its noun and no
# preposition.
BAD_START = re.compile(
    r"""\W*(?:
        what|whether|how|who|whom|whose|when|where|why|which|while
        |it|its|he|she|they|them|their|that|those|there|here
        |none|nothing|nobody|somebody|everybody|anybody|everything|something|anything
        |so|as|for|in|on|of|by|from|to|at|with|without|into|onto|over|under|through
        |after|before|between|until|during|beside|besides|behind|among|about|above|below
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)

# Metaphors that a newcomer would not search for; Conductor, Port and Ledger are the three that stay.
METAPHOR = re.compile(
    r"""(?:
        door|keeper|post|board|way|errand|visit|desk|seat|guest|meeting|player|trip|home|luggage|carrier
        |rollcall|goodbye
    )s?""",
    re.VERBOSE,
)
PROPER_NAMES = {"TensorBoard"}

PARTICIPLE = re.compile(
    r"""
    served|serving|started|joining|shaping|pacing|stepping|planning|splitting|grouping|sampling|reading
    |owned|coded|withheld|late
    """,
    re.VERBOSE,
)


def bad_starts(package: Package) -> list[str]:
    return [
        f"{name}: {text.splitlines()[0]}"
        for file in package.files.values()
        for name, text in file.docstrings
        if BAD_START.match(text)
    ]


def metaphors(package: Package) -> list[str]:
    """Modules and classes with such a word in their names, also in the plural."""
    names = [(file.path.stem, name) for name, file in package.files.items()]
    names += [(node.name, name) for name, file in package.files.items() for node in file.classes]
    return [
        f"{name} of {module}"
        for name, module in names
        if name not in PROPER_NAMES and any(map(METAPHOR.fullmatch, _words(name)))
    ]


def participles(package: Package) -> list[str]:
    return [name for name, file in package.files.items() if PARTICIPLE.fullmatch(file.path.stem)]


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


RULES = [bad_starts, metaphors, participles]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_offbeat_keeps_the_rule(rule) -> None:
    offences = rule(OFFBEAT)
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (bad_starts, "a.py", '"""What does not come."""'),
        (bad_starts, "a.py", 'class A:\n    """`It` has ended there, too."""'),
        (bad_starts, "a.py", 'class A:\n    async def f(self):\n        """By rank: the others."""'),
        (metaphors, "a.py", "class WorkerDoor: ..."),
        (metaphors, "a.py", "def f():\n    class HTTPVisits: ..."),
        (metaphors, "homes.py", ""),
        (metaphors, "roll_call/goodbye.py", ""),
        (participles, "core/stepping.py", ""),
    ],
)
def test_the_rule_sees_an_offence(rule, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "offbeat" / name).parent.mkdir(parents=True)
    (tmp_path / "offbeat" / name).write_text(text)
    assert len(rule(Package(tmp_path / "offbeat"))) == 1


def test_words_inside_of_other_words_are_none(tmp_path: Path) -> None:
    (tmp_path / "offbeat").mkdir()
    (tmp_path / "offbeat" / "dashboard.py").write_text('"""Item on a page."""\nclass Gateway: ...')
    assert [rule(Package(tmp_path / "offbeat")) for rule in RULES] == [[], [], []]
