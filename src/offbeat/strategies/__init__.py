"""The table of strategies. A new method is its own file and a line here."""

from __future__ import annotations

from typing import Any

from offbeat.core.strategy import Strategy
from offbeat.strategies.asp import ASP
from offbeat.strategies.bsp import BSP
from offbeat.strategies.diloco import DiLoCo
from offbeat.strategies.dssp import DSSP
from offbeat.strategies.gssp import GSSP
from offbeat.strategies.local_sgd import LocalSGD
from offbeat.strategies.oscars import Oscars
from offbeat.strategies.osp import OSP
from offbeat.strategies.selsync import SelSync
from offbeat.strategies.ssd_sgd import SSDSGD
from offbeat.strategies.ssp import SSP

STRATEGIES: dict[str, type[Strategy[Any]]] = {
    cls.name: cls for cls in (BSP, LocalSGD, DiLoCo, SelSync, OSP, SSDSGD, ASP, SSP, DSSP, GSSP, Oscars)
}
