"""offbeat rendezvous: a store that answers until it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from offbeat.worlds.processes.elastic.registry import connect_store
from tests.support.commands import command
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


def test_store_answers_until_it_is_interrupted() -> None:
    started = [sys.executable, "-m", "offbeat", "rendezvous", "127.0.0.1:0"]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"OFFBEAT_RENDEZVOUS=(\S+)", process.stdout.readline())
        assert address is not None
        store = connect_store(address[1], HANG_S)
        assert store.add("n", 2) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130


def test_train_refuses_what_cannot_be_elastic_before_it_starts_anything() -> None:
    said = command("train", "quadratic", "--elastic", "--strategy", "ssp", "--steps", 3)
    assert said.code == 2
    assert "has a parameter server" in said.err
