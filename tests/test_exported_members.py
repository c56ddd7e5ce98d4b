"""The public names: exactly these, sorted."""

from __future__ import annotations

import offbeat


def test_exported_members() -> None:
    assert offbeat.__all__ == [
        "ASP",
        "BSP",
        "DSSP",
        "OSP",
        "SSP",
        "Arrived",
        "Block",
        "DataError",
        "Lane",
        "LaunchError",
        "LocalSGD",
        "MismatchError",
        "OffbeatError",
        "Op",
        "Pending",
        "Port",
        "RankLost",
        "Replica",
        "SettingError",
        "Strategy",
        "Sync",
        "attach",
    ]
    assert all(hasattr(offbeat, name) for name in offbeat.__all__)
