"""The dashboard's HTTP server: real requests on loopback, events as they happen, and strangers refused."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import pytest

from offbeat.experiments.loop import Evaluation
from tests.support.dashboard_stage import Stage
from tests.support.limits import HANG_S


def test_events_come_as_they_happen_and_end_with_training(stage: Stage) -> None:
    stage.go(1, 0.1, 0.1, 0.1, seconds=1.0)
    heard: list[str] = []
    first = threading.Event()

    def follow() -> None:
        with urllib.request.urlopen(stage.dashboard.url + "events", timeout=HANG_S) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            for line in answer:
                heard.append(line.decode().strip())
                first.set()

    reader = threading.Thread(target=follow)
    reader.start()
    assert first.wait(HANG_S)
    stage.dashboard.evaluated([Evaluation(5, 2.0, 0.5, 0.75)], stage.entries)
    stage.dashboard.closed()
    reader.join(HANG_S)
    assert not reader.is_alive()
    events = [json.loads(line[6:]) for line in heard if line.startswith("data: ")]
    assert [line for line in heard if line.startswith("event: ")][-1] == "event: end"
    assert events[0]["step"] in (1, 5)
    assert events[-2]["history"] == [{"step": 5, "seconds": 2.0, "loss": 0.5, "value": 0.75}]
    stage.dashboard = Stage().dashboard  # for the fixture to close


def test_it_is_for_this_machine_alone(stage: Stage) -> None:
    assert stage.dashboard.url.startswith("http://127.0.0.1:")
    assert "<!doctype html>" in stage.get("")
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        stage.get("state", Host="evil.example:80")
    refused.value.close()
    with pytest.raises(urllib.error.HTTPError, match="404") as unknown:
        stage.get("passwords")
    unknown.value.close()
