"""What a user may get wrong is told in a sentence, at once, and costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import WORKERS, simulate

pytestmark = pytest.mark.virtual


# --- the command line


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (WORKERS.replace("0.1", "-1"), 2, "workers[0].step_s: expected a number of seconds above 0"),
        (WORKERS.replace("1gbit", "fast", 1), 3, "workers[0].up: expected bits per second"),
        (WORKERS + "cuont = 2", 5, "workers[0].cuont: not a known field; did you mean 'count'?"),
        (WORKERS + 'site = "eu"', 5, "workers[0].site: no [[sites]] has the name 'eu'"),
        (WORKERS + "[[away]]\nworker = 7\nfrom_s = 1", 6, "away[0].worker: expected below 1"),
        (WORKERS + "latency_s =", 5, "not TOML: Invalid value"),
        ("", 1, "workers: missing; expected one or more [[workers]]"),
    ],
    ids=["value", "rate", "field", "site", "rank", "syntax", "empty"],
)
def test_a_bad_cluster_file_is_told_with_line_and_field(
    tmp_path: Path, text: str, line: int, problem: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    said = simulate(tmp_path / "out", "--cluster", file)
    assert said.code == 2
    assert f"error: {file}, line {line}: {problem}" in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--cluster", "lan1g"], "no cluster is named 'lan1g'; did you mean 'lan-1g'?"),
        (["--cluster", "nowhere.toml"], "nowhere.toml: the cluster file cannot be read"),
        (["--strategy", "bps"], "did you mean 'bsp'?"),
        (["--set", "period=3"], "bsp has no setting 'period'"),
        (["--workers", 0], "workers=0: a whole number of workers, at least 1"),
        (["--steps", 0], "steps=0: a whole number of steps, at least 1"),
        (["--lr", "nan"], "lr=nan: a finite number above 0"),
        (["--device", "abacus"], "abacus"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--order", "seldb"], "unknown order 'seldb'; did you mean 'seldp'?"),
        (["--skew", 3], "skewed chunks need a data order that has chunks"),
        (["--inject", "half"], "--inject 'half': write two fractions, such as 0.5,0.5"),
        (["--inject", "0.5,2"], "inject.beta=2.0: a fraction from 0 to 1"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_bad_option_is_told(tmp_path: Path, args: list[object], problem: str) -> None:
    said = simulate(tmp_path / "out", *args)
    assert said.code == 2
    assert problem in said.err
    assert said.err.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pair", ["period", "=4"])
def test_a_setting_that_is_no_pair_is_told_with_its_option(tmp_path: Path, pair: str) -> None:
    said = simulate(tmp_path / "out", "--strategy", "local_sgd", "--set", pair)
    assert (said.code, said.err) == (2, f"error: --set {pair!r} is not a setting: write it as key=value\n")


def test_results_are_not_overwritten_without_force(tmp_path: Path) -> None:
    assert simulate(tmp_path).code == 0
    first = (tmp_path / "summary.json").read_text()
    said = simulate(tmp_path, "--seed", 1)
    assert said.code == 2
    assert f"{tmp_path} already holds a summary.json" in said.err
    assert "--force" in said.err
    assert (tmp_path / "summary.json").read_text() == first
    assert simulate(tmp_path, "--seed", 1, "--force").code == 0
    assert (tmp_path / "summary.json").read_text() != first


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_file_in_the_way_is_told_before_the_run(tmp_path: Path, option: str) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("mine")
    said = simulate(tmp_path / "out", option, in_the_way / "x" if option == "--trace" else in_the_way)
    assert said.code == 2
    assert str(in_the_way) in said.err
    assert "step 1" not in said.out
    assert in_the_way.read_text() == "mine"


def test_brackets_in_a_summary_are_shown_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('summary = "two racks [/a and b]"\n' + WORKERS)
    said = simulate(tmp_path / "out", "--cluster", file)
    assert said.code == 0
    assert "two racks [/a and b]" in " ".join(said.out.split())
