"""offbeat list: strategies, tasks and clusters, for people and for programs."""

from __future__ import annotations

import json

import pytest

from offbeat.codecs import CODECS
from offbeat.experiments.tasks import TASKS
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import preset_names
from tests.support.commands import command, offbeat

pytestmark = pytest.mark.processes


def test_list_for_programs() -> None:
    listed = json.loads(offbeat("list", "--json").stdout)
    assert [strategy["name"] for strategy in listed["strategies"]] == list(STRATEGIES)
    assert [task["name"] for task in listed["tasks"]] == list(TASKS)
    assert [codec["name"] for codec in listed["codecs"]] == list(CODECS)
    required = {codec["name"]: codec["required"] for codec in listed["codecs"] if codec["required"]}
    assert required == {"topk": ["ratio"], "randomk": ["ratio"], "error_feedback": ["codec"]}
    assert listed["refused"] == []
    assert {"lan-1g", "paper-gssp"} <= {cluster["name"] for cluster in listed["clusters"]}


def test_list_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = command("list")
    assert (said.code, said.err) == (0, "")
    rows = {line.split()[0] for line in said.out.splitlines() if line and not line.startswith(" ")}
    assert rows >= {*STRATEGIES, *CODECS, *TASKS, *preset_names()}
    assert "period=" in said.out
    assert "accuracy, higher is better" in said.out and "lower is better" in said.out


@pytest.mark.parametrize("name", ["local_sgd", "LocalSGD", "topk", "digits", "slow-lan"])
def test_one_name_shows_that_one_only(name: str) -> None:
    said = command("list", name)
    assert (said.code, said.err) == (0, "")
    rows = {line.split()[0] for line in said.out.splitlines() if line and not line.startswith(" ")}
    others = {*STRATEGIES, *CODECS, *TASKS, *preset_names()} - {name, "local_sgd"}
    assert not rows & others
    assert ("period=8" in said.out) == (name.lower().replace("_", "") == "localsgd")


def test_a_name_that_is_not_there_is_told_with_the_nearest() -> None:
    said = command("list", "lokal_sgd")
    assert said.code == 2
    assert "nothing is named 'lokal_sgd'; did you mean 'local_sgd'?" in said.err
