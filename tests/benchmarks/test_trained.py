"""The table of runs to the end: differences are between runs of one seed, and the cache can grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.catalog import RESULTS
from benchmarks.papers import trained, trained_curves, trained_pages
from benchmarks.papers.runs import Cache, cluster_of, in_bfloat16, perform, strategy_of, with_optimizer
from benchmarks.papers.trained_runs import CONTENDERS, MODELS, WORKERS, Contender, run_of
from benchmarks.support import tables

from offbeat.experiments.tasks import task
from tests.support.small_data import write_small

BSP, OSP = CONTENDERS["BSP"], CONTENDERS["OSP"]
KEPT = Cache(RESULTS / "raw" / "trained")


def _add(
    cache: Cache,
    contender: Contender,
    seed: int,
    value: float,
    sent: int,
    model: str = "resnet18",
    best: float | None = None,
) -> None:
    metric = "perplexity" if model == "transformer" else "accuracy"
    outcome = {"metric": metric, "value": value, "best": value if best is None else best}
    outcome |= {"lssr": 0.5, "bytes_sent": sent, "machine": "a GPU"}
    cache.add(run_of(model, contender, seed), outcome)


def test_differences_are_between_runs_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    cache = Cache(tmp_path, "trained")
    for seed, value in ((0, 0.94), (1, 0.95), (2, 0.90)):
        _add(cache, BSP, seed, value, 100)
    for seed, value in ((0, 0.945), (1, 0.945)):
        _add(cache, OSP, seed, value, 50)
    for contender, value, best in ((BSP, 120.0, 110.0), (OSP, 121.5, 113.0)):
        _add(cache, contender, 0, value, 100, "transformer", best)
    trained.write_table(Cache(tmp_path, "trained"))
    written = next((tmp_path / "results" / "trained").glob("*.md")).read_text()
    both = "93.00 (90.00 to 95.00) |  | " * 2
    assert f"| resnet18 | BSP | defaults (defaults) | 1 | 3 | {both}0.50 | 1.00 |" in written
    both = "94.50 (94.50 to 94.50) | +0.00 ± 6.35 (-0.50 to +0.50) | " * 2
    assert f"| 1 | 2 | {both}0.50 | 0.50 |" in written
    row = (
        "| transformer | OSP | defaults (defaults) | 1 | 1 | 121.50 | +1.50 | 113.00 | +3.00 | 0.50 | 1.00 |"
    )
    assert row in written
    assert "- transformer: 15 epochs" in written and "- vgg11" not in written
    assert "perplexity, lower is better; claims go by the best evaluation" in written


def test_a_method_that_trains_twice_as_long_is_compared_with_bsp_s_usual_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    cache = Cache(tmp_path, "trained")
    for name, value in (
        ("BSP", 0.93),
        ("BSP, twice as long", 0.94),
        ("SelSync, δ 0.1, twice as long", 0.935),
    ):
        _add(cache, CONTENDERS[name], 0, value, 100)
        of = CONTENDERS[name.removesuffix(", twice as long")]
        assert run_of("resnet18", CONTENDERS[name], 0) == replace(
            run_of("resnet18", of, 0), steps=CONTENDERS[name].length * MODELS["resnet18"].steps
        )
    trained.write_table(cache)
    written = next((tmp_path / "results" / "trained").glob("*.md")).read_text()
    assert "| BSP, twice as long | defaults (defaults) | 2 | 1 | 94.00 | +1.00 |" in written
    assert "| SelSync, δ 0.1, twice as long | delta=0.1 (ours) | 2 | 1 | 93.50 | +0.50 |" in written


@pytest.mark.virtual
def test_a_model_with_an_optimizer_of_its_own_is_trained_with_it(tmp_path: Path) -> None:
    """Its runs have a key of their own; keys of the others are as they were before there was a choice."""
    write_small(tmp_path)
    run = run_of("resnet18-adamw", BSP, 0)
    assert run.model == "resnet18" and '"optimizer": "adamw"' in run.key
    assert "optimizer" not in run_of("resnet18", BSP, 0).key
    what = with_optimizer(task("cifar10", model="resnet18", lr=0.003), "adamw")
    optimizer = what.optimizer(what.build())
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["lr"] == 0.003
    few = replace(trained.tiny(run), workers=2, steps=2)
    outcomes = [perform(each, tmp_path) for each in (few, replace(few, optimizer=""))]
    assert outcomes[0]["history"][-1]["loss"] != outcomes[1]["history"][-1]["loss"]


def test_a_model_in_mixed_precision_computes_in_bfloat16_and_keeps_float32(tmp_path: Path) -> None:
    write_small(tmp_path)
    run = run_of("vgg19-bf16", BSP, 0)
    assert run.model == "vgg19" and '"precision": "bfloat16"' in run.key
    assert "precision" not in run_of("vgg19", BSP, 0).key
    what = in_bfloat16(task("cifar10", model="vgg11"))
    model, images = what.build(), torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    computed: list[torch.dtype] = []
    convolutions[1].register_forward_hook(lambda module, inputs, output: computed.append(output.dtype))
    what.gradient(model, (images, torch.tensor([1, 2])))
    assert computed == [torch.bfloat16]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}
    assert all(each.weight.is_contiguous(memory_format=torch.channels_last) for each in convolutions)
    few = replace(trained.tiny(run_of("resnet18-adamw", BSP, 0)), workers=2, steps=2)
    outcomes = [perform(each, tmp_path) for each in (few, replace(few, precision=""))]
    assert outcomes[0]["history"][-1]["loss"] != outcomes[1]["history"][-1]["loss"]


def test_claims_go_by_the_best_evaluation_where_bsp_overfits() -> None:
    for name, of in MODELS.items():
        early = []
        for seed in range(3):
            outcome = KEPT.get(run_of(name, BSP, seed))
            if outcome:
                values = [evaluation["value"] for evaluation in outcome["history"]]
                early.append(values.index(outcome["best"]) + 1 <= len(values) // 2)
        if early:
            assert (of.claims == "best") == all(early), name


def test_runs_are_found_again_and_older_keys_stay(tmp_path: Path) -> None:
    run = run_of("lenet5", BSP, 0)
    assert '"schedule": "cosine"' in run.key
    Cache(tmp_path, "trained").add(run, {"value": 1.0})
    assert Cache(tmp_path, "other").get(run) == {"value": 1.0}
    assert Cache(tmp_path, "other").get(run_of("lenet5", BSP, 1)) is None


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_run_can_be_built(model: str, name: str) -> None:
    run = run_of(model, CONTENDERS[name], 0)
    assert strategy_of(run).name == run.strategy
    assert cluster_of(run).size == WORKERS


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("model", "name"), [("vgg11", "SelSync, δ 0.2"), ("transformer", "GSSP"), ("seq2seq", "GDTopK")]
)
def test_tiny_runs_of_each_kind_of_task(model: str, name: str, tmp_path: Path) -> None:
    write_small(tmp_path)
    run = replace(trained.tiny(run_of(model, CONTENDERS[name], 0)), workers=2, steps=2)
    outcome = perform(run, tmp_path)
    assert outcome["complete"] and outcome["value"] >= 0 and outcome["bytes_sent"] > 0


# --- pages of strategies


@pytest.mark.parametrize("strategy", trained_pages.PAGES)
def test_a_page_has_the_rows_of_the_newest_table(strategy: str) -> None:
    text = trained_pages.page_of(strategy).read_text(encoding="utf-8")
    assert trained_pages.refreshed(text, strategy) == text, "python -m benchmarks run trained --pages"
    assert (trained_pages.HEADING in text) == bool(trained_pages.section(strategy))
    path, drawn = trained_pages.picture_of(strategy), trained_curves.picture(strategy, KEPT)
    shown = path.read_text(encoding="utf-8") if path.exists() else ""
    assert shown == drawn, "python -m benchmarks run trained --pages, and look at the picture"


def test_what_is_written_by_hand_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"model": "lenet5", "contender": "OSP", "settings": "defaults", "score": "99.00"}]
    monkeypatch.setattr(trained_pages, "newest", lambda: ("a.md", rows))
    first = trained_pages.refreshed("before\n\n## Paper\n\n| a table |\n", "osp")
    assert first.startswith("before\n\n### Trained") and "| lenet5 | OSP | 99.00 |\n\n## Paper" in first
    remark = first.replace("\n## Paper", "\nA remark.\n\n| own |\n\n## Paper")
    rows[0]["score"] = "98.00"
    assert trained_pages.refreshed(remark, "osp") == remark.replace("99.00", "98.00")
    assert trained_pages.refreshed("## Paper\n", "asp") == "## Paper\n", "it has no row"
