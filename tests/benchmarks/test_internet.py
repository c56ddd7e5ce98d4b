"""The benchmark internet: runs are kept for a command that goes on; its page is written from raw results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.support import kept as kept_runs
from benchmarks.support import tables
from benchmarks.support.kept import kept
from benchmarks.virtual_time import internet, internet_page, internet_raw
from benchmarks.virtual_time.internet_raw import Kept, all_kept, keep
from benchmarks.virtual_time.internet_runs import (
    COLLECTIVE,
    ELASTIC,
    LEFT_OUT,
    SERVED,
    SERVER,
    WAITS,
    Case,
    cases,
    run,
    work,
)

from offbeat.cli.parse import strategies_of
from offbeat.core.elastic import check_elastic
from offbeat.core.strategy import Strategy
from offbeat.experiments.planner.cost import Price
from offbeat.strategies import STRATEGIES

COLUMNS = internet.COLUMNS


class Brief(Case):
    """A run that is given up at once."""

    longest_s = 0.0  # type: ignore[assignment]


FAST = Brief("quadratic", "asp", SERVER, 12, 600.0)


def strategy(text: str) -> Strategy[Any]:
    (found,) = strategies_of(text, [])
    return found


def test_every_strategy_and_server_form_is_run_or_left_out_with_a_reason() -> None:
    named = [strategy(text) for text in (*SERVED, *COLLECTIVE, *LEFT_OUT)]
    assert {(each.name, each.server_half() is not None) for each in named} == {
        (name, form.server_half() is not None)
        for name, cls in STRATEGIES.own.items()
        for form in (cls(), *([strategy(f"{name}(on=server)")] if hasattr(cls, "on") else []))
    }
    assert all(strategy(text).server_half() is not None for text in SERVED)
    for text in COLLECTIVE:
        check_elastic(strategy(text), 2)


def test_several_strategies_can_be_chosen() -> None:
    assert [(case.strategy, case.how) for case in cases(10_000, "asp,bsp")] == [
        ("asp", SERVER),
        ("bsp", ELASTIC),
        ("bsp", WAITS),
    ]
    assert {case.strategy for case in cases(1000, "diloco")} == {
        "diloco(period=8)",
        "diloco(on=server,period=8)",
    }


def test_raw_results_of_the_same_code_and_machine_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internet_raw, "code_print", lambda: "code")
    served, elastic, waits = cases(10_000, "asp,bsp")
    found = {"cpu_s": 1.0, "problem": "ended"}
    keep(Kept(10_000, "here", {waits: found, served: found}), tmp_path)
    keep(Kept(10_000, "here", {elastic: found}), tmp_path)
    keep(Kept(1000, "here", {Case("quadratic", "gone", SERVER, 1000): found}), tmp_path)
    assert all_kept(tmp_path) == [
        Kept(1000, "here", {}),
        Kept(10_000, "here", dict.fromkeys([served, elastic, waits], found)),
    ]
    assert [internet.is_whole(each) for each in all_kept(tmp_path)] == [False, True]
    keep(Kept(10_000, "there", {elastic: found}), tmp_path)
    assert list(all_kept(tmp_path)[1].found) == [elastic], "another machine"


def test_the_page_is_written_from_raw_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "internet.md"
    page.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(internet_page, "PAGE", page)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    found = {"cpu_s": 60.0, "problem": "", "value": 0.01, "reached_s": 60.0, "batches": 9, "bytes": 5}
    found |= {"ended_s": 7200.0, "machine_s": 3600.0}
    runs = [
        Kept(1000, "one machine", dict.fromkeys(cases(1000), found)),
        Kept(10_000, "one machine", dict.fromkeys(cases(10_000, "asp"), found)),
    ]
    monkeypatch.setattr(internet, "all_kept", lambda: runs)
    internet.main(["--table"])
    text = page.read_text(encoding="utf-8")
    assert "run internet --workers 10000 --only asp`" in text
    assert "| auto | elastic | lives | 9 | 0.01 | 1 min | 5 B | $0.25 | 60 |" in text
    assert "`osp(on=server)` is left out: its server" in text
    (result,) = (tmp_path / "internet").glob("*-10000-workers.md")
    assert "on one machine: one machine." in result.read_text(encoding="utf-8")


def test_a_result_is_kept_for_the_same_run_of_the_same_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"number": made[-1], "unfinished": made[-1] == 0}

    file = tmp_path / "kept" / "run.json"
    assert kept(file, ["asp", 3], make)[0]["number"] == 0, "not finished, so not kept"
    assert kept(file, ("asp", 3), make)[0]["number"] == 1
    assert kept(file, ["asp", 3], make) == ({"number": 1, "unfinished": False}, True)
    assert kept(file, ["asp", 4], make)[0]["number"] == 2, "another run"
    monkeypatch.setattr(kept_runs, "code_print", lambda: "other code")
    assert kept(file, ["asp", 4], make)[0]["number"] == 3


def test_a_command_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Case] = []
    most = 2

    def run(case: Case, out: Path) -> dict[str, Any]:
        if len(ran) == most:
            raise KeyboardInterrupt
        ran.append(case)
        return {"cpu_s": 1.0, "problem": ""}

    monkeypatch.setattr(internet, "run", run)
    planned = list(cases(1000, "bsp"))
    assert [(case.task, case.how) for case in planned] == [
        (task, how) for task in ("quadratic", "digits") for how in (ELASTIC, WAITS)
    ]
    with pytest.raises(KeyboardInterrupt):
        internet.run_all(planned, tmp_path, 1)
    most = 4
    found, were_kept = internet.run_all(planned, tmp_path, 1)
    assert were_kept == 2
    assert [found[case] for case in planned] == 4 * [{"cpu_s": 1.0, "problem": ""}]
    assert [case.how for case in ran] == [ELASTIC, ELASTIC, WAITS, WAITS], "the short ones last"


@pytest.mark.virtual
def test_a_run_is_a_process_of_its_own_and_says_when_it_fails(tmp_path: Path) -> None:
    case = Case("quadratic", "asp", SERVER, 12, 600.0)
    found, here = run(case, tmp_path), work(case, tmp_path / "here")
    assert found["cpu_s"] > 0.0
    assert {**found, "cpu_s": 0.0} == {**here, "cpu_s": 0.0}
    with pytest.raises(RuntimeError, match="quadratic-no_such-server-12 failed"):
        run(case._replace(strategy="no_such"), tmp_path)
    assert run(FAST, tmp_path)["unfinished"], "given up after its time"


@pytest.mark.virtual
def test_a_run_says_what_became_of_it(tmp_path: Path) -> None:
    case = Case("quadratic", "asp", SERVER, 12, 600.0)
    found = work(case, tmp_path)
    assert found["ended_s"] == 600.0
    assert 12 * 600 / 80 * 0.3 < found["batches"] < 12 * 600 / 20, "steps take 20 to 80 s; some are away"
    assert 0.3 < found["machine_s"] / (13 * 600) < 1
    fate, batches, _, to_target, *_ = internet.shown(found, Price.parse("$1/h"))
    assert (fate, batches, to_target) == ("lives", str(found["batches"]), "–")


ROWS = [
    ["quadratic", "asp", "server", "lives", "9", "0.01", "67 min", "1 kB", "$2", "3"],
    ["quadratic", "bsp", "elastic", "lives", "8", "0.2", "–", "1 kB", "$2", "3"],
    ["quadratic", "bsp", "waits", "stands nearly still", "1", "–", "–", "1 kB", "$2", "3"],
]
PAGE = "# On\n\n## What became of 1,000 workers\n\nOld.\n\n## What is not in these figures\n\n- Much.\n"


def test_the_page_has_the_newest_table(tmp_path: Path) -> None:
    new = internet_page.section(1000, COLUMNS, ROWS, ["Two notes.", "In a row."], Path("internet/day.md"))
    assert "reached by `asp` (server). `bsp` (elastic) live, but" in new
    assert "The other 1 do not live." in new
    assert "| asp | server | lives | 9 | 0.01 | 67 min | 1 kB | $2 | 3 |" in new
    text = internet_page.refreshed(PAGE, new)
    assert text == PAGE.replace("## What became of 1,000 workers\n\nOld.\n", new)
    assert internet_page.refreshed(text, new) == text
    larger = internet_page.section(10_000, COLUMNS, ROWS, [], Path("internet/day.md"), " --only asp")
    assert "run internet --only asp`" in larger
    both = internet_page.refreshed(text, larger)
    assert new in both and larger in both and both.endswith(PAGE[PAGE.index("## What is not") :])


def test_the_page_of_the_docs_can_be_refreshed() -> None:
    text = internet_page.PAGE.read_text(encoding="utf-8")
    assert text.count(internet_page.heading(1000) + "\n") == 1
    assert text.count(internet_page.BEFORE) == 1
