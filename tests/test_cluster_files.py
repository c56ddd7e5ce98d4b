"""The files of examples/kubernetes and examples/skypilot name options and variables that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_command

from offbeat.cli import app

ROOT = Path(__file__).parents[1]
FILES = [
    *sorted((ROOT / "examples" / "kubernetes").glob("*.yaml")),
    *sorted((ROOT / "examples" / "skypilot").glob("*.yaml")),
    *sorted((ROOT / "examples" / "slurm").glob("*.sbatch")),
]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
VARIABLE = re.compile(r"\bOFFBEAT_[A-Z]+\b")


def known_variables() -> set[str]:
    sources = (ROOT / "src").rglob("*.py")
    return {found for path in sources for found in re.findall(r'"(OFFBEAT_[A-Z]+)"', path.read_text("utf-8"))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_are_read_by_the_code(path: Path) -> None:
    assert set(VARIABLE.findall(path.read_text("utf-8"))) <= known_variables()


def test_options_of_serve_exist() -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in serve.params for option in parameter.opts}
    named = set(OPTION.findall((ROOT / "examples" / "kubernetes" / "server.yaml").read_text("utf-8")))
    assert {"--workers", "--listen"} <= named <= known


def test_options_of_torchrun_exist() -> None:
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    run = (ROOT / "examples" / "skypilot" / "task.yaml").read_text("utf-8").partition("\nrun:")[2]
    named = set(OPTION.findall(run))
    assert {"--nnodes", "--node-rank", "--master-addr"} <= named <= known
