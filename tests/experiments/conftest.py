"""A browser for the tests of pages, and a comparison for it to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import PROGRAM, Browser
from tests.support.commands import command


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs a real browser: apt-get install chromium")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three strategies, two seeds, virtual time: one waits, one rarely, one reads from a server."""
    out = tmp_path_factory.mktemp("compared")
    names = ["--strategies", "bsp,local_sgd(weighted=true),ssp", "--seeds", "0,1", "--world", "virtual"]
    how = ["--cluster", "stragglers", "--workers", 3, "--steps", 24, "--evaluate-every", 4, "--target", 100]
    said = command("compare", "quadratic", *names, *how, "--out", out)
    assert said.code == 0, said.err
    return out
