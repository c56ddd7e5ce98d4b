"""docs/write_your_own.md works as it is written: its files, and its commands in their order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.limits import HANG_S
from tests.support.plugins import pip_install
from tests.support.python import Python

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[1] / "docs" / "write_your_own.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_line(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a line of a shell in `folder`, and return what it printed."""
    program, *arguments = shlex.split(line)
    if program == "pip":
        assert arguments == ["install", "."]
        pip_install(folder, folder.parent / "site-packages")
        path = [str(folder.parent / "site-packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        return ""
    if program == "python":
        script = f"import runpy, sys; sys.path[:0] = ['.']; runpy.run_path({arguments[0]!r})"
        started = Python("-c", script, cwd=folder, stdout=subprocess.PIPE, text=True)
    else:
        assert program == "offbeat"
        started = Python("-m", "offbeat", *arguments, cwd=folder, stdout=subprocess.PIPE, text=True)
    with started as process:
        printed = process.communicate(timeout=HANG_S)[0]
    assert process.returncode == 0, printed
    return str(printed)


def test_page_leads_from_an_empty_file_to_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "growing"
    folder.mkdir()
    printed = {}
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language:
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a {language} block without the name of its file"
            (folder / name[1]).write_text(text)
        else:
            for line in text.splitlines():
                printed[" ".join(line.split()[:2])] = run_line(line, folder, monkeypatch)
    assert list(printed) == ["python try_it.py", "pip install", "offbeat list", "offbeat compare"]
    assert "growing" in printed["python try_it.py"]
    assert re.search(r"^growing +step locally.* from growing 0\.1\.0", printed["offbeat list"], re.MULTILINE)
    assert "growing longest=64" in printed["offbeat compare"]
    assert "growing" in (folder / "curve" / "report.html").read_text()
