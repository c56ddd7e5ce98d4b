"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.crew import Crew
from tests.support.python import fork_forkservers

# A shell's background job ignores interrupts, as would all that it starts: tests of Ctrl-C would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every machine tries the same examples, and none of them fails for being slow.
settings.register_profile(
    "offbeat", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("offbeat")

fork_forkservers()

# As each rank of a crew has: other threads, other sums. And the tests' models are too small for several.
torch.set_num_threads(1)

# The files that take longest begin first: one that began last would keep a single process busy in the end.
LONGEST = (
    "conformance/test_features",
    "sharded/test_session",
    "conformance/test_training",
    "tests/test_slurm",
    "cli/test_serve",
    "worlds/test_both_worlds",
    "conformance/test_loops",
    "cli/test_train",
    "conformance/test_consensus",
    "conformance/test_one_worker",
    "conformance/test_resume",
    "strategies/test_push_pull_processes",
    "processes/elastic/test_session",
    "osp/test_osp_virtual",
    "benchmarks/test_diloco_settings",
    "codecs/test_all_reduce",
    "processes/test_lost_ranks",
    "processes/test_pairwise",
    "tests/test_examples",
    "strategies/test_ssp_processes",
    "cuda/test_topk",
    "server/test_shard_processes",
    "strategies/test_memory_processes",
    "core/test_membership",
    "elastic/test_torchrun",
    "tasks/test_both_worlds",
    "virtual/test_server",
    "osp/test_osp",
    "tests/test_plugin",
    "ssd_sgd/test_ssd_sgd_processes",
    "conformance/test_bytes",
    "core/test_every_setting",
    "strategies/test_server_variants",
    "processes/test_members",
    "server/test_cut_off",
    "processes/test_orphan",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by time, as far as it matters; the tests of a file stay in their order."""
    places = {f"{name}.py": place for place, name in enumerate(LONGEST)}

    def place(item: pytest.Item) -> int:
        path = item.nodeid.split("::")[0]
        return next(
            (number for name, number in places.items() if f"/{path}".endswith(f"/{name}")), len(places)
        )

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Never search what was imported for wrappers of a model, nor for garbage: it stays to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _crews() -> Iterator[dict[int, Crew]]:
    crews: dict[int, Crew] = {}
    yield crews
    for crew in crews.values():
        crew.dismiss()


@pytest.fixture
def crew(_crews: dict[int, Crew]) -> Callable[[int], Crew]:
    """`crew(2)` gives two ranks with a process group; they are kept from test to test while they live.

    Ranks in which tests have left too much behind are replaced between two tests.
    """
    for world in [world for world, crew in _crews.items() if crew.littered]:
        _crews.pop(world).dismiss()

    def hire(world: int) -> Crew:
        if world not in _crews or not _crews[world].fit():
            _crews[world] = Crew(world)
        return _crews[world]

    return hire


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The real data sets: from OFFBEAT_DATA, or beside the checkout."""
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("OFFBEAT_DATA", beside))
    if not folder.is_dir():
        pytest.skip("needs the real data sets: set OFFBEAT_DATA to their folder")
    return folder
