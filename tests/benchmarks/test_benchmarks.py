"""The entry point, the catalog and the index of results of the benchmarks."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.catalog import BENCHMARKS, RESULTS, UnknownBenchmark, find_benchmark
from benchmarks.support import tables
from benchmarks.support.tables import Table, command_line

from benchmarks import __main__ as entry

FOLDER = RESULTS.parent
ROOT = FOLDER.parent
INDEX = RESULTS / "README.md"
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
OUTSIDE_CATALOG = {"hosts", "environment"}  # run as modules of their own
LONGEST = 400


def links(page: Path) -> list[Path]:
    return [(page.parent / target).resolve() for target in LINK.findall(page.read_text(encoding="utf-8"))]


def test_every_result_is_in_the_index() -> None:
    results = {path for path in RESULTS.rglob("*") if path.is_file()} - {INDEX}
    assert results
    assert not results - set(links(INDEX))


@pytest.mark.parametrize("page", [INDEX, FOLDER / "README.md"], ids=["index", "readme"])
def test_every_link_leads_somewhere(page: Path) -> None:
    missing = [target for target in links(page) if not target.exists()]
    assert not missing


def test_every_result_is_of_a_benchmark_and_has_a_date() -> None:
    for path in RESULTS.rglob("*.md"):
        if path != INDEX:
            assert path.parent.name in BENCHMARKS
            assert re.fullmatch(r"\d{4}-\d\d-\d\d(-[a-z0-9-]+)?\.md", path.name), path


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_a_module_with_a_main_and_its_command(name: str) -> None:
    spec = importlib.util.find_spec(BENCHMARKS[name].module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert "\ndef main(arguments: Sequence[str]) ->" in source
    assert f"python -m benchmarks run {name}" in source
    assert f'benchmark_parser("{name}", __doc__)' in source


def test_every_module_that_can_be_run_is_in_the_catalog() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FOLDER.rglob("*.py")
        if "\ndef main(" in path.read_text(encoding="utf-8")
        and path.stem not in OUTSIDE_CATALOG | {"__main__"}
    }
    assert modules == {benchmark.module for benchmark in BENCHMARKS.values()}


def test_the_list_has_all_benchmarks_and_their_newest_results() -> None:
    shown = entry.list_benchmarks()
    for benchmark in BENCHMARKS.values():
        assert f"\n{benchmark.name} " in shown
        assert benchmark.question in shown
    assert "benchmarks/results/selsync_time/2026-11-16.md" in shown
    assert "benchmarks/results/peers/2026-11-16.md" in shown
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for benchmark in BENCHMARKS.values():
        assert f"| `{benchmark.name}` | {benchmark.question}" in readme


def test_an_unknown_name_is_answered_by_the_nearest() -> None:
    with pytest.raises(UnknownBenchmark, match="did you mean 'overlap_accuracy'"):
        find_benchmark("overlap-acuracy")
    with pytest.raises(UnknownBenchmark, match="python -m benchmarks list"):
        find_benchmark("zzz")


def test_a_benchmark_s_own_help_is_shown() -> None:
    command = [sys.executable, "-m", "benchmarks", "run", "scale", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m benchmarks run scale")
    assert "How many workers can virtual time simulate?" in done.stdout


def test_a_table_is_written_to_its_benchmark_s_folder_with_the_command_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["__main__.py", "run", "codecs", "--device", "cuda"])
    table = Table("codecs", "A question?", ["codec", "ms"], variant="cuda")
    table.note("a note")
    table.row("topk", "1.0")
    path = table.write()
    assert path.parent == tmp_path / "codecs"
    assert path.name.endswith("-cuda.md")
    text = path.read_text()
    assert "Made by `python -m benchmarks run codecs --device cuda` on one machine" in text
    assert text.endswith("- a note\n\n| codec | ms |\n|---|---|\n| topk | 1.0 |\n")


def test_a_command_names_no_folder_of_this_machine() -> None:
    assert command_line(["run", "a", "--data", "/x", "--out=/y", "--only", "b c"]) == (
        "python -m benchmarks run a --data FOLDER --out=FOLDER --only 'b c'"
    )


def test_files_are_short() -> None:
    for path in FOLDER.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, path
