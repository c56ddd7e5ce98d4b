"""Offbeat: semi-synchronous data-parallel training for PyTorch.

Names are imported when they are first used, so that `import offbeat` and the help of commands do not wait
for torch.
"""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.attach import Sync, attach
    from offbeat.codecs import BFloat16, Codec, ErrorFeedback, Half, PowerSGD, Quantize, RandomK, TopK
    from offbeat.core.blocks import Block
    from offbeat.core.pending import Arrived, Pending
    from offbeat.core.port import Lane, Op, Port
    from offbeat.core.replica import Replica
    from offbeat.core.strategy import Strategy
    from offbeat.data.injection import DataInjection
    from offbeat.data.partition import label_skew
    from offbeat.data.samplers import DefDP, SelDP
    from offbeat.data.shared_sampler import SharedSampler
    from offbeat.errors import (
        DataError,
        LaunchError,
        MismatchError,
        OffbeatError,
        RankDropped,
        RankLost,
        SettingError,
    )
    from offbeat.experiments.simulate import SimulationResult, simulate
    from offbeat.strategies.asp import ASP
    from offbeat.strategies.auto import Auto
    from offbeat.strategies.bsp import BSP
    from offbeat.strategies.diloco import DiLoCo
    from offbeat.strategies.dssp import DSSP
    from offbeat.strategies.gssp import GSSP
    from offbeat.strategies.gssp.gdtopk import GDTopK
    from offbeat.strategies.local_sgd import LocalSGD
    from offbeat.strategies.oscars import Oscars
    from offbeat.strategies.osp import OSP
    from offbeat.strategies.selsync import SelSync
    from offbeat.strategies.sparse_loco import SparseLoCo
    from offbeat.strategies.ssd_sgd import SSDSGD
    from offbeat.strategies.ssp import SSP

    __version__: str

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "GSSP",
    "OSP",
    "SSDSGD",
    "SSP",
    "Arrived",
    "Auto",
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
    "SharedSampler",
    "SimulationResult",
    "SparseLoCo",
    "Strategy",
    "Sync",
    "TopK",
    "attach",
    "label_skew",
    "simulate",
]

_MODULES = {
    "offbeat.attach": ("Sync", "attach"),
    "offbeat.codecs": (
        "BFloat16",
        "Codec",
        "ErrorFeedback",
        "Half",
        "PowerSGD",
        "Quantize",
        "RandomK",
        "TopK",
    ),
    "offbeat.core.blocks": ("Block",),
    "offbeat.core.pending": ("Arrived", "Pending"),
    "offbeat.core.port": ("Lane", "Op", "Port"),
    "offbeat.core.replica": ("Replica",),
    "offbeat.core.strategy": ("Strategy",),
    "offbeat.data.injection": ("DataInjection",),
    "offbeat.data.partition": ("label_skew",),
    "offbeat.data.samplers": ("DefDP", "SelDP"),
    "offbeat.data.shared_sampler": ("SharedSampler",),
    "offbeat.errors": (
        "DataError",
        "LaunchError",
        "MismatchError",
        "OffbeatError",
        "RankDropped",
        "RankLost",
        "SettingError",
    ),
    "offbeat.experiments.simulate": ("SimulationResult", "simulate"),
    "offbeat.strategies.asp": ("ASP",),
    "offbeat.strategies.auto": ("Auto",),
    "offbeat.strategies.bsp": ("BSP",),
    "offbeat.strategies.diloco": ("DiLoCo",),
    "offbeat.strategies.dssp": ("DSSP",),
    "offbeat.strategies.gssp": ("GSSP",),
    "offbeat.strategies.gssp.gdtopk": ("GDTopK",),
    "offbeat.strategies.local_sgd": ("LocalSGD",),
    "offbeat.strategies.oscars": ("Oscars",),
    "offbeat.strategies.osp": ("OSP",),
    "offbeat.strategies.selsync": ("SelSync",),
    "offbeat.strategies.sparse_loco": ("SparseLoCo",),
    "offbeat.strategies.ssd_sgd": ("SSDSGD",),
    "offbeat.strategies.ssp": ("SSP",),
}  # where each name is defined
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
        if isinstance(value, type):
            _document(value)
    else:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    setattr(sys.modules[__name__], name, value)  # found without this function from now on
    return value


def _document(cls: type[Any]) -> None:
    """Show the settings of a strategy or codec in `help()`."""
    from offbeat.core.documentation import document
    from offbeat.core.settings import Settings

    if issubclass(cls, Settings) and is_dataclass(cls):
        document(cls)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("offbeat")
    except PackageNotFoundError:
        return "unknown (Offbeat is not installed, only found on the path)"


class _Package(ModuleType):
    """The module `offbeat`. Its `attach` stays the function when the module offbeat.attach is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attach" and isinstance(value, ModuleType):
            value = value.attach
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let functions that use the module be sent to other processes, as Ray does with cloudpickle."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
