"""The page of errors has the words of every error that Offbeat raises, and of every warning that it logs."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "offbeat"
sys.path[:0] = [str(ROOT / "docs" / "site")]

from error_texts import Found, Sources  # noqa: E402
from generated import errors_page  # noqa: E402

# Errors that hand on the text of another one, which is on the page itself, or have none.
HANDED_ON = {
    "DataError('; '.join(problems))",
    "FieldError((), f'{text!r}: {problem}')",
    "FieldError((part, *self.path), self.problem, given=self.given, or_none=self.or_none)",
    "FieldError(error.path, error.problem, given=error.given, or_none=or_none)",
    "FieldError((key,), str(problem))",
    "KeyError(name)",
    "LaunchError(str(failed))",
    "OffbeatError(str(damaged) or type(damaged).__name__)",
    "ProtocolError(str(malformed))",
    "ConnectionError(str(unreachable))",
    "RankLost(elsewhere)",
    "RankLost(latest.stopped)",
    "RankLost(roster.stopped)",
    "SettingError(f'{option} {error}')",
    "SettingError(f'{text!r}: {error}')",
    "SettingError(f'{file}, line {line_of(error.path, source)}: {error.in_file}')",
    "TimeIsUp(self._history)",
}
WORDS = re.compile(r"[A-Za-z]{3,}")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(PACKAGE)


@pytest.fixture(scope="module")
def found(sources: Sources) -> list[Found]:
    return list(sources.raised())


def test_every_raise_has_its_words_on_the_page(sources: Sources, found: list[Found]) -> None:
    """Counted on its own: the raises of all files, and those that functions make for others to raise."""
    told = {(each.module, each.line) for each in found if WORDS.search(each.text)}
    missing = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("offbeat", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = (
                node.exc
                if isinstance(node, ast.Raise)
                else node.value
                if isinstance(node, ast.Return)
                else None
            )
            if not isinstance(made, ast.Call) or not made.args:
                continue
            name = ast.unparse(made.func).rpartition(".")[2]
            is_error = name in ("Exit",) or sources.is_error(name)
            if isinstance(node, ast.Raise) and not is_error:
                assert name in sources.named, f"{module}: who makes {ast.unparse(made)}?"
            elif is_error and name != "Exit" and (module, made.lineno) not in told:
                missing.append(f"{module}: {ast.unparse(made)}")
    new = [each for each in missing if each.partition(": ")[2] not in HANDED_ON]
    assert not new, "\n".join(new)


@pytest.mark.parametrize(
    "words",
    [
        "is not a setting: write it as key=value",
        "the loop has changed weights by itself",  # core/weight_watch
        "steps parameter … of the attached model",  # core/ownership
        "it would train on each rank by itself. close() and attach again",  # a constant of the module
        "the ranks' models have different frozen parameters",  # core/untrained
        "no data folder is given",  # an argument of the function that makes the error
        "Start the script with torch's launcher",  # a constant that format() fills in
        "its checksum is wrong",  # an error of Python's that another one quotes
        "; did you mean",  # of a helper
        "connection to … lost, reconnecting",  # a warning
    ],
)
def test_words_are_found_wherever_they_are_written(found: list[Found], words: str) -> None:
    assert any(words in each.text for each in found), words


SOURCE = """
WHY = "the disk is full"
class OddError(ValueError):
    pass
def fail(x, reason):
    more = f"; {x} more" if x else ""
    raise OddError(f"{x} | cannot go on: {WHY} or {reason}{more}")
def caller():
    fail(1, "the cable is cut")
    log.warning("shard %d is slow", 3)
def other():
    raise _made("a text")
def _made(text):
    return ValueError("it was " + text)
"""


def test_names_helpers_and_arguments_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    texts = {(each.kind, each.text) for each in Sources(tmp_path).raised()}
    assert texts == {
        ("OddError", "… | cannot go on: the disk is full or the cable is cut⟨; … more⟩"),
        ("ValueError", "it was a text"),
        ("Warnings", "shard … is slow"),
    }
    page = errors_page(tmp_path)
    assert "- `… | cannot go on: the disk is full or the cable is cut⟨; … more⟩` (a)" in page
    assert page.index("## OddError") < page.index("## ValueError") < page.index("## Warnings")
