"""offbeat rendezvous: hold the store in which elastic workers find each other, apart from all of them."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from offbeat.cli.terminal import Terminal


def rendezvous_command(
    listen: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where workers reach this host; port 0: any free one.")
    ] = "127.0.0.1:29500",
) -> None:
    """Hold the store of an elastic training, until interrupted. It uses next to no memory, time or bandwidth.

    Start each worker by itself, with  OFFBEAT_RENDEZVOUS=HOST:PORT RANK=0 WORLD_SIZE=4 python train.py  and
    start it again if it dies. The first WORLD_SIZE workers begin; others may join while they train.
    """
    from offbeat.worlds.processes.elastic.registry import RENDEZVOUS
    from offbeat.worlds.processes.listen_store import listen_store
    from offbeat.worlds.processes.server.bootstrap import parse_address

    console = Terminal()
    host, tcp_port = parse_address(listen)
    store = listen_store(host, tcp_port)
    console.say(f"start each worker with  {RENDEZVOUS}={host}:{store.port} RANK=… WORLD_SIZE=… python …")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
