"""Manifests: those of the real data sets are complete and can be used to fetch and to verify files."""

from __future__ import annotations

import re

import pytest

from offbeat.experiments.tasks import TASKS
from offbeat.experiments.tasks.files.manifest import COMPRESSED, DatasetManifest, File

MANIFESTS = {name: kind.manifest for name, kind in TASKS.items() if kind.manifest is not None}


def test_names_are_those_of_the_files_in_order() -> None:
    files = (File("two", 2, "b"), File("one", 1, "a"))
    assert DatasetManifest("set", files, "", "", ()).names == ("two", "one")


def test_all_tasks_with_data_to_fetch_have_one() -> None:
    assert set(TASKS) - set(MANIFESTS) == {"digits", "quadratic"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_says_all_that_is_needed(name: str) -> None:
    manifest = MANIFESTS[name]
    assert manifest.files and manifest.origin and manifest.licence and manifest.addresses
    assert len(set(manifest.names)) == len(manifest.files)
    for file in manifest.files:
        assert re.fullmatch("[0-9a-f]{64}", file.sha256) and file.nbytes > 0
        assert not file.name.endswith(COMPRESSED), "by its name without the suffix"
    for address in manifest.addresses:
        assert address.startswith(("http://", "https://"))
        assert "{name}" in address or address.endswith((".zip", ".tar.gz"))
    assert "/" not in manifest.folder
