"""The public names: exactly these, sorted."""

from __future__ import annotations

import offbeat


def test_exported_members() -> None:
    assert offbeat.__all__ == [
        "ASP",
        "BSP",
        "DSSP",
        "GSSP",
        "OSP",
        "SSDSGD",
        "SSP",
        "Arrived",
        "BFloat16",
        "Block",
        "Codec",
        "DataError",
        "DataInjection",
        "DefDP",
        "DiLoCo",
        "ErrorFeedback",
        "GDTopK",
        "Half",
        "Lane",
        "LaunchError",
        "LocalSGD",
        "MismatchError",
        "OffbeatError",
        "Op",
        "Oscars",
        "Pending",
        "Port",
        "PowerSGD",
        "Quantize",
        "RandomK",
        "RankDropped",
        "RankLost",
        "Replica",
        "SelDP",
        "SelSync",
        "SettingError",
        "SimulationResult",
        "SparseLoCo",
        "Strategy",
        "Sync",
        "TopK",
        "attach",
        "label_skew",
        "simulate",
    ]
    assert all(hasattr(offbeat, name) for name in offbeat.__all__)
