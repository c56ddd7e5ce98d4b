"""The table of strategies. A new method is its own file and a line here; plugins follow (`core/plugins.py`).

Other processes find the class of a strategy from outside by its path, `package.module:Class`.
"""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

from offbeat.core.plugins import Catalog
from offbeat.core.settings import lookup
from offbeat.core.strategy import Strategy
from offbeat.errors import SettingError
from offbeat.strategies.asp import ASP
from offbeat.strategies.auto import Auto
from offbeat.strategies.bsp import BSP
from offbeat.strategies.diloco import DiLoCo
from offbeat.strategies.dssp import DSSP
from offbeat.strategies.gssp import GSSP
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.oscars import Oscars
from offbeat.strategies.osp import OSP
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.sparse_loco import SparseLoCo
from offbeat.strategies.ssd_sgd import SSDSGD
from offbeat.strategies.ssp import SSP

_OWN = (BSP, LocalSGD, DiLoCo, SparseLoCo, SelSync, OSP, SSDSGD, ASP, SSP, DSSP, GSSP, Oscars, Auto)
STRATEGIES: Catalog[Strategy[Any]] = Catalog(
    "strategy", "offbeat.strategies", Strategy, {cls.name: cls for cls in _OWN}
)


def path_of(cls: type[Strategy[Any]]) -> str:
    """Return the name or the path by which another process finds this class."""
    if STRATEGIES.own.get(cls.name) is cls:
        return cls.name
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ == "__main__" or "<" in cls.__qualname__:
        raise SettingError(
            f"{path}: the parameter server is a process of its own, which cannot import this class. Move it "
            "to the top level of a module"
        )
    return path


def find_strategy(path: str) -> type[Strategy[Any]]:
    """Return the class with this name, if it is one of ours, or with this path."""
    module, colon, name = path.partition(":")
    if not colon:
        return lookup("strategy", path, STRATEGIES.own)
    try:
        cls = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as missing:
        raise SettingError(f"the strategy {path} cannot be imported here: {missing}") from missing
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise SettingError(f"{path} is no strategy")
    return cls
