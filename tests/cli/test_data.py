"""offbeat data: what is there, what is missing, what is damaged, and fetching it."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from offbeat.experiments.tasks import TASKS
from offbeat.experiments.tasks.mnist import Mnist
from tests.support.commands import command
from tests.support.data_site import FILES, Site, singles
from tests.support.data_site import site as site
from tests.support.plugins import offer, searching


@pytest.fixture
def tiny(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The mnist task, with two small files on the site for data."""
    monkeypatch.setattr(Mnist, "manifest", singles(site))
    monkeypatch.delenv("OFFBEAT_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return site


def offbeat_data(*arguments: object) -> tuple[object, str]:
    said = command("data", *arguments)
    return said.code, " ".join((said.out + said.err).split())


def test_the_command_says_what_is_missing_and_how_to_get_it(tiny: Site, tmp_path: Path) -> None:
    code, said = offbeat_data("mnist", "digits")
    assert code == 1
    for part in ("2 missing of 2", "one: missing", "Made for tests.", f"{tiny.root}/FILE.gz", "OFFBEAT_DATA"):
        assert part in said
    assert "offbeat data mnist --data DIR --download" in said
    assert "nothing is needed" in said
    assert offbeat_data("digits")[0] == 0


def test_the_command_fetches_and_verifies(tiny: Site, tmp_path: Path) -> None:
    code, said = offbeat_data("mnist", "--data", tmp_path, "--download")
    assert code == 0, said
    assert f"mnist: {tmp_path / 'set' / 'one.gz'}" in said and "verified in set" in said
    (tmp_path / "set" / "one.gz").write_bytes(gzip.compress(b"changed"))
    code, said = offbeat_data("mnist", "--data", tmp_path)
    assert code == 1
    assert "1 not as published of 2 files" in said
    assert FILES[0].sha256 in said and hashlib.sha256(b"changed").hexdigest() in said


def test_the_command_says_why_it_could_not_fetch(tiny: Site, tmp_path: Path) -> None:
    tiny.pages.clear()
    code, said = offbeat_data("mnist", "--data", tmp_path, "--download")
    assert code == 1 and "the server answers 404" in said and "one: missing" in said
    code, said = offbeat_data("mnist", "--download")
    assert code == 2 and "say where to put the data" in said
    code, said = offbeat_data("mnits")
    assert code == 2 and "did you mean 'mnist'" in said


def test_every_data_set_here_is_verified(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    small = ["mnist", "fashion-mnist", "multi30k", "wikitext2", "shakespeare"]  # cifar10 takes seconds
    code, said = offbeat_data(*small, "--data", data_folder, "--json")
    assert code == 0, said


def test_broken_plugin_does_not_break_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFBEAT_DATA", raising=False)
    offer(tmp_path, "torn-tasks", "offbeat.tasks", {"torn": "torn_tasks:Torn"})
    with searching(TASKS, tmp_path):
        code, said = offbeat_data("--json")
        assert code == 1 and '"digits"' in said and "torn" not in said
        assert "'torn' of torn-tasks 1.0" in offbeat_data("torn")[1]
