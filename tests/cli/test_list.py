"""offbeat list: strategies, tasks and clusters, for people and for programs."""

from __future__ import annotations

import json

import pytest

from offbeat.experiments.tasks import TASKS
from offbeat.strategies import STRATEGIES
from tests.support.commands import offbeat

pytestmark = pytest.mark.processes


def test_list_for_programs() -> None:
    listed = json.loads(offbeat("list", "--json").stdout)
    assert [strategy["name"] for strategy in listed["strategies"]] == list(STRATEGIES)
    assert [task["name"] for task in listed["tasks"]] == list(TASKS)
    assert {"lan-1g", "paper-gssp"} <= {cluster["name"] for cluster in listed["clusters"]}
