"""Plugins of tests: packages that look installed, and a package that pip installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.core.plugins import Catalog
from tests.support.limits import HANG_S


def offer(folder: Path, package: str, group: str, offers: dict[str, str], module: str = "") -> None:
    """Write what pip writes for version 1.0 of a package with these entry points: metadata, and a module."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in offers.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    (folder / f"{package.replace('-', '_')}.py").write_text(module)


@contextmanager
def searching(catalog: Catalog[Any], folder: Path) -> Iterator[None]:
    """Let one of Offbeat's catalogs find the plugins of a folder, in this process."""
    sys.path.insert(0, str(folder))
    vars(catalog).pop("_offers", None)  # those it has found before
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        vars(catalog).pop("_offers", None)


def pip_install(source: Path, target: Path) -> None:
    """Install a package from its sources, without a network: setuptools is here, and so is what it needs."""
    sources = shutil.copytree(source, target.parent / f"{target.name}-sources")  # a build writes beside them
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(sources)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
