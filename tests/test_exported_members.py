"""The public names: exactly these, sorted."""

from __future__ import annotations

import offbeat


def test_exported_members() -> None:
    assert offbeat.__all__ == [
        "ASP",
        "BSP",
        "DSSP",
        "OSP",
        "SSDSGD",
        "SSP",
        "Arrived",
        "Block",
        "DataError",
        "DataInjection",
        "DefDP",
        "Lane",
        "LaunchError",
        "LocalSGD",
        "MismatchError",
        "OffbeatError",
        "Op",
        "Oscars",
        "Pending",
        "Port",
        "RankLost",
        "Replica",
        "SelDP",
        "SelSync",
        "SettingError",
        "Strategy",
        "Sync",
        "attach",
        "label_skew",
    ]
    assert all(hasattr(offbeat, name) for name in offbeat.__all__)
