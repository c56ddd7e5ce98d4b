"""Number of shards on each host: as asked for, or as the links need it (server/pieces.py)."""

from __future__ import annotations

import logging
import os

import torch

from offbeat.errors import SettingError
from offbeat.worlds.processes.link_rate import measure_link_rate
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.server.config import ServerSpec
from offbeat.worlds.processes.server.signed_store import SignedStore

PIECES = "OFFBEAT_PIECES"  # the environment variable: shards on each host; auto: by the model and the links
AUTO = "auto"
MOST_ASKED = 64
SLOWEST = 0.0  # bytes per second of a link
log = logging.getLogger("offbeat")


def shared_pieces(
    port: ProcessPort, store: SignedStore, spec: ServerSpec, hosts: int, device: torch.device
) -> int:
    """Return the number of shards on each host, as rank 0 asks for, or else as the links need it.

    One on a single host, and where links are emulated: their emulation does not show in connections of TCP.
    """
    if port.rank == 0:
        decided = 1 if hosts == 1 or port.shaper is not None else 0
        store.set("server/asked", str(asked_pieces() or decided))
    if asked := int(store.get("server/asked")):
        return asked
    if spec.pieces(hosts, port.world, SLOWEST) == 1:
        return 1
    bytes_per_s = measure_link_rate(port, device, spec.nbytes)
    if port.rank == 0:
        pieces = spec.pieces(hosts, port.world, bytes_per_s)
        log.info("links of %.0f Mbit/s: %d shards on each host", 8e-6 * bytes_per_s, pieces)
        store.set("server/pieces", str(pieces))
    return int(store.get("server/pieces"))


def asked_pieces(default: str = AUTO) -> int:
    """Return the number of shards on each host that the environment asks for; 0: as the links need it."""
    asked = os.environ.get(PIECES) or default
    if asked == AUTO:
        return 0
    if not asked.isdecimal() or not 1 <= int(asked) <= MOST_ASKED:
        raise SettingError(f"{PIECES}={asked}: a whole number from 1 to {MOST_ASKED}, or {AUTO}, is needed")
    return int(asked)
