"""The launcher: real local processes, ranks of one group, and what is said when one of them fails."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from offbeat.errors import LaunchError, SettingError
from offbeat.worlds.processes.launcher import launch, threads_for, under_launcher, workers_of_environment
from offbeat.worlds.processes.server.auth import TOKEN

pytestmark = pytest.mark.processes


def leave_a_note(folder: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    note = " ".join(os.environ[name] for name in names)
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    (folder / os.environ["RANK"]).write_text(note)


def knock_elsewhere(folder: Path) -> None:
    """Leave a note of who answers at the store's port, on its address and on another one of this host."""
    answers = []
    for host in (os.environ["MASTER_ADDR"], "127.0.0.2"):
        with socket.socket() as knocking:
            answers.append(knocking.connect_ex((host, int(os.environ["MASTER_PORT"]))))
    (folder / os.environ["RANK"]).write_text(f"{answers} {os.environ[TOKEN]}")


def fail(how: str, said: Path) -> None:
    if os.environ["RANK"] == "1":
        sys.stderr = said.open("w", buffering=1)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SettingError("lr=0: a finite number above 0")


def test_every_rank_runs_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch(2, leave_a_note, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "0 2 1", "1": "1 2 1"}


def test_the_store_is_on_loopback_alone_and_all_ranks_have_a_new_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv(TOKEN, raising=False)
    launch(2, knock_elsewhere, tmp_path)
    notes = [(tmp_path / rank).read_text() for rank in "01"]
    assert notes[0] == notes[1]
    assert notes[0].startswith(f"[0, {errno.ECONNREFUSED}] ") and len(notes[0].split()[-1]) == 64
    assert TOKEN not in os.environ
    monkeypatch.setenv(TOKEN, "given")
    launch(1, knock_elsewhere, tmp_path)
    assert (tmp_path / "0").read_text().endswith(" given")


def test_cores_are_divided_among_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")  # and put back, as it was, afterwards
    monkeypatch.setattr("offbeat.worlds.processes.launcher.usable_cores", lambda: 6)
    launch(2, leave_a_note, tmp_path)
    assert (tmp_path / "1").read_text() == "1 2 3"
    launch(1, leave_a_note, tmp_path)
    assert (tmp_path / "0").read_text() == "0 1 6", "whatever was launched before"
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_user_says_how_many_threads_a_worker_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("5", "5,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert threads_for(3) == 5


@pytest.mark.parametrize(
    ("how", "ended"),
    [("killed", "was ended by SIGKILL: "), ("raises", "failed with exit code 1; its output is above")],
)
def test_a_rank_that_fails_is_named(tmp_path: Path, how: str, ended: str) -> None:
    said = tmp_path / "said"
    with pytest.raises(LaunchError, match=f"rank 1 {ended}"):
        launch(2, fail, how, said)
    wanted = {"killed": "", "raises": "rank 1: lr=0: a finite number above 0\n"}
    assert said.read_text() == wanted[how], "a sentence, not a traceback"


def test_a_launcher_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (under_launcher(), workers_of_environment()) == (False, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (under_launcher(), workers_of_environment()) == (True, 4)
