"""offbeat compare and report in virtual time: several seeds, taking turns; nothing is lost."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from offbeat.cli.compare import folder_names
from offbeat.cli.tables import comparison_table
from offbeat.experiments.report.aggregate import grouped
from offbeat.strategies import STRATEGIES
from tests.support.commands import command, compare, read_summary
from tests.support.interrupted import interrupt
from tests.support.plugins import offer, searching

pytestmark = pytest.mark.virtual


def test_strategies_take_turns_and_every_run_is_kept(tmp_path: Path) -> None:
    said = compare(tmp_path, "--seeds", "3,1", "--cluster", "stragglers", "--target", 1e6)
    assert said.code == 0, said.err
    runs = read_summary(tmp_path)
    order = [("bsp", 3), ("local_sgd", 3), ("bsp", 1), ("local_sgd", 1)]
    assert [(run["strategy"], run["seed"]) for run in runs] == order
    for run in runs:
        alone = read_summary(tmp_path / run["folder"])
        assert run == {**alone, "folder": f"{run['strategy']}/seed-{run['seed']}"}
        assert (run["world"], run["cluster"], run["complete"]) == ("virtual", "stragglers", True)
        first = run["history"][0]
        assert run["seconds_to_target"] == first["seconds"] > 0
        assert run["bytes_to_target"] == first["bytes_sent"]
        assert run["history"][-1]["bytes_sent"] == run["bytes_sent"]
        sent = [point["bytes_sent"] for point in run["history"]]
        assert sent == sorted(sent)
    assert runs[0]["value"] != runs[2]["value"], "another seed"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_a_comparison_equals_the_single_runs(tmp_path: Path) -> None:
    assert compare(tmp_path / "both", "--seeds", "0,1").code == 0
    single = ["--workers", 2, "--steps", 6, "--evaluate-every", 2, "--strategy", "local_sgd", "--seed", 1]
    assert command("simulate", "quadratic", *single, "--out", tmp_path / "one").code == 0
    assert read_summary(tmp_path / "both" / "local_sgd" / "seed-1") == read_summary(tmp_path / "one")


def test_one_strategy_with_several_settings(tmp_path: Path) -> None:
    variants = (
        "local_sgd, local_sgd(period=2),local_sgd( period = 3 ),bsp,bsp(codec=ErrorFeedback(RandomK(0.5)))"
    )
    said = compare(tmp_path, "--strategies", variants, "--set", "local_sgd.weighted=true", "--seeds", "0,1")
    assert said.code == 0, said.err
    runs = read_summary(tmp_path)
    codec = "bsp-codec-error_feedback-randomk-0.5"
    folders = ["local_sgd-period-8", "local_sgd-period-2", "local_sgd-period-3", "bsp-codec-none", codec]
    assert [run["folder"] for run in runs] == [f"{name}/seed-{seed}" for seed in (0, 1) for name in folders]
    assert [run["settings"].get("period") for run in runs[:5]] == [8, 2, 3, None, None]
    assert [run["settings"].get("weighted") for run in runs[:5]] == [True, True, True, None, None]
    assert runs[4]["settings"]["codec"] == "error_feedback(randomk(0.5))"
    for run in runs:
        assert run == {**read_summary(tmp_path / run["folder"]), "folder": run["folder"]}
    assert [run["sync_steps"] for run in runs[:3]] == [0, 3, 2], "each ran with its own period"
    labels = [group.label for group in grouped(runs)]
    assert labels[1:4] == ["local_sgd period=2", "local_sgd period=3", "bsp codec=none"]
    wide = Console(width=160, file=StringIO(), color_system=None)
    with wide.capture() as captured:
        wide.print(comparison_table(grouped(runs)))
    assert all(label in captured.get() for label in labels)
    assert captured.get().count("weighted=true") == 3, "what no label tells"
    assert captured.get().count("period=2") == 1, "what one tells"
    for label in labels:
        assert f"{label}, seed 1" in said.out
        assert f'"label":"{label}"' in (tmp_path / "report.html").read_text()


LABELS = st.text("aA1=-. _:/\\é", min_size=1, max_size=130)


@given(st.lists(LABELS, unique=True, max_size=8))
@settings(deadline=None)
def test_folders_are_safe_everywhere_and_never_the_same(labels: list[str]) -> None:
    names = folder_names([f"bsp {label}" for label in labels])
    assert all(re.fullmatch(r"[a-z0-9_.-]{3,110}", name) and not name.endswith(".") for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--seeds", "0,zero"], "--seeds '0,zero': write whole numbers, such as 0,1,2"),
        (["--seeds", "1,1"], "each seed once"),
        (["--strategies", "bsp,bsp"], "bsp is listed twice with the same settings"),
        (
            ["--strategies", "local_sgd,local_sgd(period=8)"],
            "local_sgd is listed twice with the same settings",
        ),
        (["--strategies", "local_sgd(4)"], "write settings as key=value, such as local_sgd(period=4)"),
        (["--strategies", "local_sgd(period=4"], "its parentheses do not match"),
        (["--strategies", "local_sgd)period=4("], "its parentheses do not match"),
        (["--strategies", "local_sgd(period=4)bsp"], "write settings as key=value"),
        (["--strategies", "local_sgd(periot=4)"], "did you mean 'period'?"),
        (["--strategies", "bsp(codec=TopQ(0.01))"], "unknown codec 'TopQ'"),
        (["--set", "ssp.staleness=3"], "with a name out of ['bsp', 'local_sgd']"),
        (["--strategies", "bsp,selsink"], "did you mean 'selsync'?"),
        (["--world", "real"], "unknown world 'real'"),
        (["--world", "processes", "--cluster", "wan"], "--cluster wan is for --world virtual"),
        (["--cluster", "lan1g"], "did you mean 'lan-1g'?"),
        (["--slow", "1=2.0"], "--bandwidth, --pace and --slow are for real processes"),
        (["--target", "nan"], "target=nan: a finite number, or None"),
        (["--model", "gpt"], "gpt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_before_anything_runs(tmp_path: Path, args: list[str], problem: str) -> None:
    said = compare(tmp_path / "out", *args)
    assert (said.code, said.out) == (2, "")
    assert problem in said.err
    assert not (tmp_path / "out").exists()


def test_results_are_refused_and_kept_without_force(tmp_path: Path) -> None:
    assert compare(tmp_path).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for said in (compare(tmp_path, "--seeds", "1"), command("report", tmp_path)):
        assert said.code == 2
        assert "--force" in said.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert compare(tmp_path, "--seeds", "1", "--force").code == 0
    assert [run["seed"] for run in read_summary(tmp_path)] == [1, 1]
    assert command("report", tmp_path, "--force").code == 0


def test_details_say_what_made_a_run(tmp_path: Path) -> None:
    assert compare(tmp_path).code == 0
    details = json.loads((tmp_path / "local_sgd" / "seed-0" / "details.json").read_text())
    assert details["command"].startswith("offbeat compare quadratic --strategies bsp,local_sgd")
    assert details["environment"]["torch"]
    assert details["decisions"] == {"steps": 6, "width": 1, "synced": [0, 0, 0, 0, 0, 0]}
    assert [len(spans) > 0 for spans in details["timeline"]["workers"]] == [True, True]


def test_an_interrupt_leaves_what_was_known_and_a_page(tmp_path: Path) -> None:
    args = ["compare", "quadratic", "--world", "virtual", "--strategies", "bsp,local_sgd", "--seeds", "0,1"]
    more = ["--workers", "50", "--steps", "100000", "--out", str(tmp_path)]
    interrupt([*args, *more], after="bsp step")
    (known,) = read_summary(tmp_path)
    assert (known["strategy"], known["complete"]) == ("bsp", False)
    assert known["steps"] >= 1
    assert '"incomplete":["bsp' in (tmp_path / "report.html").read_text()


def test_a_terminal_names_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = re.sub(r"\x1b\[[0-9;?]*\w", "", compare(tmp_path).out).splitlines()
    named = [line for line in lines if line.startswith("run 1 of ")]
    assert named == ["run 1 of 2: bsp, seed 0 …"]
    assert [line for line in lines if line.startswith("  loss ")] != [], "its result below"


def test_a_pipe_has_a_whole_line_for_each_result(tmp_path: Path) -> None:
    lines = compare(tmp_path).out.splitlines()
    assert any(line.startswith("run 1 of 2: bsp, seed 0: loss ") for line in lines)


def test_all_strategies_are_ours_and_usable_plugins(tmp_path: Path) -> None:
    module = "from offbeat import LocalSGD\nclass Extra(LocalSGD):\n    name = 'extra'"
    offers = {"extra": "extra_strategies:Extra", "gone": "extra_strategies:Gone"}
    offer(tmp_path, "extra-strategies", "offbeat.strategies", offers, module)
    with searching(STRATEGIES, tmp_path):
        said = command("compare", "quadratic", "--set", "nobody.period=1")
    assert said.code == 2
    assert f"a name out of {[*STRATEGIES, 'extra']}" in said.err
