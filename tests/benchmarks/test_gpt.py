"""The table at the field's own task: tiny runs from end to end, found again, and the model's size."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.papers import gpt
from benchmarks.papers.gpt_run import GPTTask
from benchmarks.papers.runs import Cache
from benchmarks.support import tables

pytestmark = pytest.mark.virtual


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    (folder / "wiki.train.tokens").write_text("the cat sat on the mat . " * 400)
    (folder / "wiki.test.tokens").write_text("the mat sat on the cat . " * 4)
    return folder.parent


def test_tiny_runs_from_end_to_end(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    command = ["--data", str(data), "--out", str(tmp_path / "raw"), "--quick", "--only"]
    gpt.main([*command, "DDP", "eager, H 32", "DDP, Muon"])
    first = capsys.readouterr().out
    assert first.count("took") == 3 + 2 * 3, "three trained, and two strategies timed on three clusters"
    gpt.main([*command, "DDP", "eager, H 32", "MuLoCo, H 32"])
    second = capsys.readouterr().out
    assert second.count("took") == 1 + 3, "only the new one"
    written = next((tmp_path / "results" / "gpt").glob("*.md")).read_text()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in written.splitlines()}
    ddp, eager, muloco = rows["DDP"], rows["eager, H 32"], rows["MuLoCo, H 32"]
    losses = [float(row[4]) for row in (ddp, eager, muloco)]
    assert all(1.0 < loss < 5.0 for loss in losses), "ln 256 is 5.5"
    assert float(eager[5]) == pytest.approx(losses[1] - losses[0], abs=2e-4)
    assert ddp[6].endswith(", 1.0000") and float(eager[6].split(", ")[1]) < 1 / 32
    assert all(float(cell.strip(" |").split(", ")[1]) > 1 for cell in eager[7:10])


def test_no_run_is_started_that_would_not_end_in_time(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([0.0, 0.0, 50.0])
    monkeypatch.setattr(gpt.time, "monotonic", lambda: next(taken))
    monkeypatch.setattr(gpt, "perform", lambda *_: {"took_s": 20.0, "value": 1.0, "step_s": 0.1})
    runs = [gpt.run_of(gpt.CONTENDERS[name], 0, gpt.QUICK) for name in ("DDP", "DiLoCo, H 32")]
    cache = Cache(tmp_path / "raw")
    gpt.train(runs, cache, data, "cpu", minutes=1)
    assert [run in cache for run in runs] == [True, False]
    assert "not started, for lack of time: diloco(period=32)" in capsys.readouterr().out


def test_the_model_has_the_parameters_that_the_table_says() -> None:
    model = GPTTask().build()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 10.8
    muon, adamw = GPTTask(inner="muon").optimizers(model)
    assert sum(p.numel() for g in muon.param_groups for p in g["params"]) == 6 * 12 * 384**2
    both = [p for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
    assert set(both) == set(model.parameters()) and len(both) == len(set(both))


def test_an_outer_momentum_takes_no_time_of_its_own() -> None:
    names = ("DiLoCo, H 32", "DiLoCo, H 32, μ 0.5", "DiLoCo, H 128, μ 0.5")
    plain, half, longer = (gpt.run_of(gpt.CONTENDERS[name], 0, gpt.Sizes()) for name in names)
    assert plain != half and plain.timed("wan") == half.timed("wan") != plain.timed("lan-1g")
    assert longer.timed("wan") != half.timed("wan")


@pytest.mark.parametrize("name", gpt.CONTENDERS)
def test_every_run_can_be_built(name: str) -> None:
    run = gpt.run_of(gpt.CONTENDERS[name], 0, gpt.Sizes())
    assert run.built.name == run.strategy
    assert run.steps % getattr(run.built, "period", 1) == 0
