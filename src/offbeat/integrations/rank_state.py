"""Files of one rank's own state, beside a framework's checkpoint of what all ranks share."""

from __future__ import annotations

from pathlib import Path

import torch

from offbeat.attach import Sync
from offbeat.errors import OffbeatError


def save_rank_state(sync: Sync, folder: str | Path, number: int = 0) -> None:
    """Save this rank's state into the folder of a checkpoint. All ranks call this together.

    Several attachments, of several models, have a number each.
    """
    state = sync.state_dict()
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, _file(sync, folder, number))


def load_rank_state(sync: Sync, folder: str | Path, number: int = 0) -> None:
    """Load this rank's state from the folder of a checkpoint."""
    file = _file(sync, folder, number)
    if not file.exists():
        raise OffbeatError(
            f"{file} is missing: a checkpoint of another number of ranks, or one that Offbeat did not write. "
            "To start from its weights alone, load them before training, and do not resume"
        )
    sync.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def _file(sync: Sync, folder: str | Path, number: int) -> Path:
    model = f"-model-{number}" if number else ""
    return Path(folder) / f"offbeat-{sync.port.rank}-of-{sync.port.world}{model}.pt"
