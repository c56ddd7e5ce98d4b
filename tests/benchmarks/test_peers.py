"""The comparison with peers: its cache, contenders, search and loop. No peer needs to be installed."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import command, launch
from benchmarks.peers.cases import (
    CPU,
    CUDA,
    CUT,
    DONE,
    EQUAL,
    FAILED,
    REACHED,
    ROW,
    SEARCH,
    STRAGGLER,
    Cache,
    Case,
    Evaluation,
    Outcome,
)
from benchmarks.peers.contenders import CONTENDERS, DILOCO_TRIES, LIMIT, OURS, PEER, TRIES
from benchmarks.peers.offbeat_strategy import hidden_matrices
from benchmarks.peers.results import GOAL_TASK, best_settings, tables
from benchmarks.peers.tasks import TASKS
from benchmarks.peers.training import RankSetup, temporary_weights
from benchmarks.peers.worker import bytes_sent_at, next_evaluation
from torch import nn

from offbeat.core.settings import build
from offbeat.strategies import STRATEGIES
from tests.support.peers import case, outcome
from tests.support.ports import free_port

# --- the cache


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Cache(tmp_path)
    first.note("a link")
    told = outcome("local_sgd", (1.0, 0.5), (2.0, 0.88), settings={"period": 16})
    first.add(told)
    again = Cache(tmp_path)
    assert list(again) == [told]
    assert again.notes == ["a link"]
    assert again.get(case("local_sgd", settings={"period": 16})) == told
    assert again.get(case("local_sgd", settings={"period": 8})) is None
    assert again.get(case("local_sgd", settings={"period": 16}, purpose=SEARCH)) is None
    assert again.get(case("local_sgd", settings={"period": 16}, rate="50mbit")) is None


def test_the_order_of_settings_makes_no_other_case() -> None:
    one, other = {"period": 16, "start": 0}, {"start": 0, "period": 16}
    assert case("post_local_sgd", settings=one).key == case("post_local_sgd", settings=other).key


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.add(outcome("ddp", (1.0, 0.5)))
    cache.add(outcome("bsp", (1.0, 0.5)))
    whole = cache.path.read_text()
    cache.path.write_text(whole[:-20])
    left = Cache(tmp_path)
    assert [told.case.contender for told in left] == ["ddp"]
    left.add(outcome("osp", (1.0, 0.5)))
    assert [told.case.contender for told in Cache(tmp_path)] == ["ddp", "osp"]


def test_what_ran_again_replaces_what_was(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.add(Outcome(case=case("osp"), ended=FAILED, failure="host 3 ended"))
    cache.add(outcome("osp", (1.0, 0.5)))
    assert [told.ended for told in Cache(tmp_path)] == [DONE]


# --- the contenders


def test_every_strategy_and_every_peer_is_there() -> None:
    strategies = {c.fixed["strategy"] for c in CONTENDERS.values() if c.kind == OURS}
    assert strategies == set(STRATEGIES)
    peers = {c.needs for c in CONTENDERS.values() if c.kind == PEER}
    assert peers == {"torch", "torchft", "accelerate"}
    assert {c.kind for c in CONTENDERS.values()} == {PEER, OURS, LIMIT}


def test_all_searches_have_the_same_number_of_tries() -> None:
    for contender in CONTENDERS.values():
        wanted = (DILOCO_TRIES,) if "diloco" in contender.name else (1, TRIES)
        if "average" in contender.fixed:  # as a table of steps advises: not searched
            wanted = (1,)
        assert len(contender.tries) in wanted, contender.name
        assert len({str(sorted(settings.items())) for settings in contender.tries}) == len(contender.tries)
    kinds = [c.kind for c in CONTENDERS.values() if len(c.tries) > 1]
    assert kinds.count(PEER) == kinds.count(OURS)


@pytest.mark.parametrize("name", [name for name, c in CONTENDERS.items() if c.kind == OURS])
def test_the_settings_are_ones_that_the_strategy_takes(name: str) -> None:
    contender = CONTENDERS[name]
    divisors = {peer_task.period_divisor for peer_task in TASKS.values()}
    for tried in [tried for divisor in divisors for tried in contender.tries_for(divisor)]:
        settings = {**contender.fixed, **tried}
        build(STRATEGIES[settings.pop("strategy")], settings)


def test_muon_has_the_matrices_inside() -> None:
    inside = {"fashion-mnist/mlp": 2, "mnist/lenet5": 2, "shakespeare/gpt": 16}
    for name, count in inside.items():
        model = TASKS[name].task.build()
        names = {param: key for key, param in model.named_parameters()}
        chosen = [names[param] for param in hidden_matrices(model)]
        assert len(chosen) == count, (name, chosen)


@pytest.mark.parametrize("name", ["eager", "guards", "des_loc", "muloco"])
def test_what_the_field_has_found_since_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker: the optimizers and the settings are ones that go together."""
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for key, value in meeting.items():
        monkeypatch.setenv(key, value)
    peer_task = TASKS[GOAL_TASK]
    model = peer_task.task.build()
    contender = CONTENDERS[name]
    settings = {**contender.fixed, **contender.tries[0]}
    optimizer = peer_task.task.optimizer(model)
    setup = RankSetup(
        task=peer_task.task, model=model, optimizer=optimizer, rank=0, world=1, settings=settings
    )
    before = [param.detach().clone() for param in model.parameters()]
    images, targets = torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    with contender.open(setup) as training:
        training.step((images, targets))
        training.wait_pending()
        assert not any(map(torch.equal, before, model.parameters()))


def test_builders_are_there() -> None:
    for contender in CONTENDERS.values():
        file, _, function = contender.builder.partition(".")
        text = Path(command.__file__).with_name(f"{file}.py").read_text()
        assert f"def {function}(" in text, contender.name


# --- the search


def test_the_best_settings_at_a_rate_are_the_soonest(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for period, seconds, rate in ((8, 9.0, "1gbit"), (16, 7.0, "1gbit"), (64, 5.0, "50mbit")):
        cache.add(
            outcome(
                "local_sgd",
                (seconds, 0.88),
                settings={"period": period},
                purpose=SEARCH,
                rate=rate,
                ended=REACHED,
            )
        )
    cache.add(outcome("local_sgd", (1.0, 0.86), settings={"period": 32}, purpose=SEARCH, ended=CUT))
    cache.add(outcome("local_sgd", (0.1, 0.99), settings={"period": 4}, purpose=ROW))
    assert best_settings(cache, case("local_sgd")) == {"period": 16}
    assert best_settings(cache, case("local_sgd", rate="50mbit")) == {"period": 64}
    assert best_settings(cache, case("local_sgd", task="mnist/lenet5")) == CONTENDERS["local_sgd"].tries[0]
    assert best_settings(cache, case("selsync")) == CONTENDERS["selsync"].tries[0]


def test_a_rate_without_a_search_takes_the_settings_of_the_next(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.add(
        outcome(
            "local_sgd", (5.0, 0.88), settings={"period": 64}, purpose=SEARCH, rate="50mbit", ended=REACHED
        )
    )
    for rate in ("1gbit", "200mbit"):
        assert best_settings(cache, case("local_sgd", rate=rate)) == {"period": 64}
    cache.add(outcome("local_sgd", (5.0, 0.88), settings={"period": 16}, purpose=SEARCH, ended=REACHED))
    assert best_settings(cache, case("local_sgd")) == {"period": 16}


def test_a_contender_all_of_whose_tries_failed_has_its_first_settings(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for tried in CONTENDERS["torchft_diloco"].tries:
        cache.add(outcome("torchft_diloco", settings=tried, purpose=SEARCH, ended=FAILED))
    assert best_settings(cache, case("torchft_diloco")) == CONTENDERS["torchft_diloco"].tries[0]


def test_each_device_has_outcomes_of_its_own(tmp_path: Path) -> None:
    for device, seconds in ((CPU, 9.0), (CUDA, 3.0)):
        Cache(tmp_path, device).add(outcome("bsp", (seconds, 0.88), device=device))
    for device, variant, seconds in ((CPU, "", "9.0"), (CUDA, "cuda", "3.0")):
        cache = Cache(tmp_path, device)
        (table,) = tables(cache, "A question?")
        assert (table.benchmark, table.variant) == ("peers", variant)
        assert [row[5] for row in table.rows] == [seconds]
        assert cache.get(case("bsp", device=device)) is not None
    options = command.parse_options(
        ["--out", str(tmp_path), "--data", "x", "--device", "cuda", "--only", "bsp"]
    )
    comparison = command.Comparison(options, Cache(tmp_path, CUDA))
    assert {row.device for row in comparison.rows(GOAL_TASK, "1gbit", EQUAL)} == {CUDA}


def test_every_task_runs_at_every_rate_with_equal_workers_and_with_a_straggler(tmp_path: Path) -> None:
    options = command.parse_options(["--out", str(tmp_path), "--data", "x", "--tasks", ",".join(TASKS)])
    parts = list(command.Comparison(options, Cache(tmp_path)).combinations())
    assert len(parts) == len(set(parts)) == 3 * 2 * 3
    assert {rate for _, workers, rate in parts if workers == STRAGGLER} == {"1gbit", "200mbit", "50mbit"}


def test_a_search_only_runs_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        def set_rate(self, rate: str) -> None: ...

    purposes = {}
    for asked in ("--search", "--search-only"):
        options = command.parse_options(
            ["--out", str(tmp_path), "--data", "x", "--only", "local_sgd", "--equal", asked]
        )
        comparison = command.Comparison(options, Cache(tmp_path / asked))
        ran: list[str] = []

        def measure(_hosts: Any, tried: Case, _limit_s: float, ran: list[str] = ran) -> Outcome:
            ran.append(tried.purpose)
            return outcome("local_sgd", (5.0, 0.88))

        monkeypatch.setattr(comparison, "measure", measure)
        comparison.run(Hosts())  # type: ignore[arg-type]
        purposes[asked] = set(ran)
        assert f"{len(ran)} cases to run" in comparison.estimate()
    assert purposes == {"--search": {SEARCH, ROW}, "--search-only": {SEARCH}}


def test_a_task_of_few_steps_has_shorter_phases_for_all_alike(tmp_path: Path) -> None:
    divisor = TASKS["shakespeare/gpt"].period_divisor
    assert best_settings(Cache(tmp_path), case("local_sgd", task="shakespeare/gpt")) == {
        "period": 32 // divisor
    }
    assert CONTENDERS["torchft_diloco"].tries_for(4)[0] == {"sync_every": 8, "outer_lr": 0.4}
    assert CONTENDERS["accelerate_local_sgd"].tries_for(4)[-1] == {"steps": 32}
    assert CONTENDERS["diloco"].tries_for(4)[3] == {"period": 8, "outer_lr": 0.4, "delay": 2}
    assert CONTENDERS["selsync"].tries_for(4)[-1] == {"delta": 0.12, "period": 2}


def test_where_none_got_there_the_nearest_is_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for period, value in ((8, 0.80), (16, 0.85), (32, 0.82)):
        cache.add(outcome("local_sgd", (1.0, value), settings={"period": period}, purpose=SEARCH, ended=CUT))
    assert best_settings(cache, case("local_sgd")) == {"period": 16}


def test_settings_that_were_tried_with_several_seeds_are_judged_by_the_mean(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for period, seed, took in ((16, 1, 5.0), (32, 1, 6.0), (16, 2, 9.0), (32, 2, 6.5)):
        tried = {"settings": {"period": period}, "seed": seed, "purpose": SEARCH, "ended": REACHED}
        cache.add(outcome("local_sgd", (took, 0.88), **tried))
    assert best_settings(cache, case("local_sgd")) == {"period": 32}


def test_a_try_that_is_much_later_than_the_best_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is in the cache is not run again."""
    options = command.parse_options(
        ["--out", str(tmp_path), "--data", "x", "--only", "local_sgd,ddp", "--search"]
    )
    limits = []
    takes = iter((12.0, math.inf, 8.0, 9.0))

    def measure(_hosts: Any, function: Any, _timeout_s: float) -> Outcome:
        tried, _, _, limit_s = function.args
        limits.append(limit_s)
        points = [(seconds, 0.88)] if (seconds := next(takes)) <= limit_s else [(limit_s, 0.8)]
        return Outcome(case=tried, ended=CUT, history=tuple(Evaluation(1, s, v, 1) for s, v in points))

    class Link:
        def describe_link(self) -> str:
            return "a link (1gbit)"

    monkeypatch.setattr(launch, "run", measure)
    for _ in range(2):
        comparison = command.Comparison(options, Cache(tmp_path))
        comparison.load = lambda _task: None  # type: ignore[method-assign,assignment,return-value]
        comparison.search(Link(), GOAL_TASK, "1gbit")  # type: ignore[arg-type]
        assert limits == [TASKS[GOAL_TASK].search_limit_s, 15.0, 15.0, 10.0]
    assert best_settings(comparison.cache, case("local_sgd")) == CONTENDERS["local_sgd"].tries[2]
    assert comparison.cache.notes == ["a link (1gbit)"]


# --- the loop


def test_evaluations_are_at_fixed_intervals_and_at_the_limit() -> None:
    assert next_evaluation(0, 0.0, steps=1000, every=50, limit_s=40.0) == 10
    assert next_evaluation(10, 0.1, steps=1000, every=50, limit_s=40.0) == 50
    assert next_evaluation(50, 0.5, steps=1000, every=50, limit_s=40.0) == 100
    assert next_evaluation(1000, 10.0, steps=1004, every=50, limit_s=40.0) == 1004
    assert next_evaluation(10, 10.0, steps=1000, every=50, limit_s=40.0) == 40
    assert next_evaluation(10, 0.1, steps=1000, every=50, limit_s=40.0, start=500) == 500
    assert next_evaluation(500, 5.0, steps=1000, every=50, limit_s=40.0, start=500) == 550
    assert next_evaluation(10, 10.0, steps=1000, every=50, limit_s=40.0, start=500) == 40
    assert next_evaluation(39, 39.5, steps=1000, every=50, limit_s=40.0) == 40


def test_bytes_are_those_of_the_count_behind() -> None:
    counts = [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    assert [bytes_sent_at(seconds, counts) for seconds in (0.5, 2.0, 2.1, 9.0)] == [10.0, 20.0, 30.0, 30.0]


def test_temporary_weights_change_nothing() -> None:
    model = nn.Linear(2, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with temporary_weights(model, [torch.zeros(1, 2), torch.ones(1)]):
        assert model(torch.ones(1, 2)).item() == 1.0
    for parameter, weight in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, weight)


def test_bad_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse_options(["--out", str(tmp_path), "--data", "x", "--only", "local_sdg"])
    assert "local_sgd" in capsys.readouterr().err


def test_the_command_is_told_without_a_folder_of_this_machine() -> None:
    run, libraries, machine = command.describe_run(
        ["run", "peers", "--data", "/tmp/data", "--out", "/tmp/x", "--search"]
    )
    assert run == "run by `python -m benchmarks run peers --data FOLDER --out FOLDER --search`"
    assert f"torch {torch.__version__}" in libraries
    assert f"{os.cpu_count()} cores" in machine
