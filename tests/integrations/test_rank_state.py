"""Each rank's own state lies beside a checkpoint, and a rank finds its own again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.integrations.rank_state import load_rank_state, save_rank_state
from tests.support import loops
from tests.support.crew import Crew

pytestmark = pytest.mark.processes


def _saved_and_loaded(folder: Path) -> bool:
    """Ranks differ between two averages; whether each has its own weights again after it trained on."""
    rank = dist.get_rank()
    model = loops.mlp(rank)
    optimizer = loops.momentum(model)
    with offbeat.attach(model, optimizer, offbeat.LocalSGD(period=100)) as sync:
        loops.train(model, optimizer, loops.batches(rank, 3))
        own = loops.flat(model).clone()
        save_rank_state(sync, folder)
        loops.train(model, optimizer, loops.batches(rank, 2))
        assert not torch.equal(loops.flat(model), own)
        load_rank_state(sync, folder)
        return torch.equal(loops.flat(model), own)


def test_each_rank_has_its_own_state_again(crew: Callable[[int], Crew], tmp_path: Path) -> None:
    assert crew(2).run(_saved_and_loaded, tmp_path / "new") == [True, True]
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == ["offbeat-0-of-2.pt", "offbeat-1-of-2.pt"]


def _loaded(folder: Path) -> str:
    model = loops.mlp(0)
    with offbeat.attach(model, loops.momentum(model), offbeat.LocalSGD()) as sync:
        with pytest.raises(offbeat.OffbeatError) as told:
            load_rank_state(sync, folder)
        return str(told.value)


def test_checkpoint_of_another_number_of_ranks_is_refused(
    crew: Callable[[int], Crew], tmp_path: Path
) -> None:
    (tmp_path / "offbeat-0-of-3.pt").touch()
    assert all("checkpoint of another number of ranks" in told for told in crew(2).run(_loaded, tmp_path))
