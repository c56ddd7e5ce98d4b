"""Offbeat: semi-synchronous data-parallel training for PyTorch."""

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

__all__ = [
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
