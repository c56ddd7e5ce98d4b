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
