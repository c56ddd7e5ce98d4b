"""A shell completes commands, options, strategies, tasks and clusters, in bash, zsh and fish."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cli.completion import OWN, cluster_names, strategy_lists, strategy_names, task_names
from offbeat.experiments.tasks import TASKS
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import load_cluster
from tests.support.limits import HANG_S

MAIN = "import sys; sys.argv[0] = 'offbeat'; from offbeat.cli import main; main()"
NO_TORCH = "import sys; sys.modules['torch'] = None; "  # importing it raises an error
VARIABLES = {
    "bash": lambda words: {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": " ".join(words)},
    "fish": lambda words: {
        "_TYPER_COMPLETE_ARGS": " ".join(words),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    },
}


def test_names_are_those_of_the_package() -> None:
    assert {"strategies": tuple(STRATEGIES.own), "tasks": tuple(TASKS.own)} == OWN
    assert set(strategy_names("")) >= set(OWN["strategies"])
    assert set(task_names("")) >= set(OWN["tasks"])
    for name in cluster_names(""):
        assert load_cluster(name).size > 0


def test_what_was_typed_is_the_beginning() -> None:
    assert strategy_names("loc") == ["local_sgd"]
    assert task_names("fash") == ["fashion-mnist"]
    assert cluster_names("slow") == ["slow-lan"]
    assert strategy_lists("bsp,os") == ["bsp,osp", "bsp,oscars"]


@pytest.mark.processes
@pytest.mark.parametrize("shell", VARIABLES)
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("offbeat", "sim"), "simulate"),
        (("offbeat", "train", "digits", "--strategy", "loc"), "local_sgd"),
    ],
    ids=["command", "strategy"],
)
def test_a_shell_completes_without_torch(shell: str, words: tuple[str, ...], completed: str) -> None:
    asked = {**VARIABLES[shell](words), "_OFFBEAT_COMPLETE": f"complete_{shell}"}
    answer = subprocess.run(
        [sys.executable, "-c", NO_TORCH + MAIN],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert completed in answer.stdout
    assert "Error" not in answer.stderr


def test_the_page_on_installing_names_the_shells() -> None:
    page = (Path(__file__).parents[2] / "docs" / "install.md").read_text("utf-8")
    assert "offbeat --install-completion" in page
    assert [shell for shell in VARIABLES if shell not in page] == []
