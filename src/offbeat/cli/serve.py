"""offbeat serve: start a parameter server on a machine of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import Terminal
from offbeat.errors import LaunchError, SettingError

if TYPE_CHECKING:
    from offbeat.worlds.processes.server.bootstrap import Rendezvous

REACH_S = 60.0  # seconds to wait for the first server


def serve_command(
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "-w", metavar="N", help="Number of workers that must join before training begins."
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to listen for workers and further servers; port 0: any free one."
        ),
    ] = "127.0.0.1:29600",
    shards: Annotated[
        int, typer.Option(metavar="N", help="Server processes in total, on this and further hosts.")
    ] = 1,
    here: Annotated[
        int | None,
        typer.Option(metavar="N", help="Server processes on this host. \\[default: all, with --join: 1]"),
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The address of the first `offbeat serve`.")
    ] = None,
    snapshots: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for snapshots. A server that finds its snapshot there continues from it.",
        ),
    ] = Path("snapshots"),
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Seconds between snapshots. \\[default: 30]", show_default=False
        ),
    ] = None,
    replicate: Annotated[
        bool,
        typer.Option(
            "--replicate",
            help="Keep a copy of each shard at the next one: no acknowledged update is lost when one dies.",
        ),
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not encrypt connections from other hosts.")
    ] = False,
) -> None:
    """Start a parameter server on this host, for strategies that need one (asp, ssp, dssp, gssp, oscars).

    Start each worker with  OFFBEAT_SERVER=HOST:PORT OFFBEAT_TOKEN=SECRET python train.py  at any time; new
    workers, and workers that died, may join during training. The first worker provides the model. The server
    ends when the last worker has left. A server process that dies is restarted from its snapshot.

    On a second host, start  offbeat serve --join HOST:PORT  with the same OFFBEAT_TOKEN; the first server
    then needs --shards 2 --here 1.
    """
    import torch

    from offbeat.core.units import size
    from offbeat.experiments.report.aggregate import changed
    from offbeat.worlds.processes.server.auth import TOKEN
    from offbeat.worlds.processes.server.bootstrap import SERVER, SNAPSHOT_S, Rendezvous
    from offbeat.worlds.processes.server.discovery import INSECURE
    from offbeat.worlds.processes.server.supervisor import Supervisor

    console = Terminal()
    every = SNAPSHOT_S if every is None else every
    if every <= 0:
        raise SettingError(f"--every {every}: more than 0 seconds are needed")
    token = os.environ.get(TOKEN) or secrets.token_hex(16)
    if join:
        if not os.environ.get(TOKEN):
            raise LaunchError(f"set {TOKEN} to the token that the first server printed")
        rendezvous = Rendezvous.at(join, token.encode(), REACH_S)
        shards, workers, here = rendezvous.number("shards"), rendezvous.number("workers"), here or 1
    else:
        rendezvous = _listen(listen, shards, workers, replicate, token.encode())
        here = shards if here is None else here
        assert workers is not None
        address = f"{rendezvous.host}:{rendezvous.tcp_port}"
        people = "1 worker" if workers == 1 else f"{workers} workers"
        console.say(f"serving {people} at {address}, server processes here: {here} of {shards}")
        console.say(f"start each worker with\n  {SERVER}={address} {TOKEN}={token} python train.py")
    first = rendezvous.store.add("placed", here) - here
    if first + here > shards:
        raise LaunchError(f"there are {shards} shards in total, and {first} of them already run elsewhere")
    with console.status("waiting for the first worker"):
        spec = rendezvous.wait_for_spec()
    supervisors, pieces = [], rendezvous.pieces(spec)
    for number in range(first, first + here):
        config = spec.process_config(
            number,
            shards,
            pieces,
            snapshots=snapshots,
            replicate=bool(rendezvous.number("replicate")),
            host=rendezvous.host,
            tcp_port=rendezvous.tcp_port,
            prefix=rendezvous.prefix,
            workers=workers,
            local_workers=[],
            snapshot_s=every,
            dedicated=True,
            insecure=insecure or bool(os.environ.get(INSECURE)),
        )
        supervisors.append(Supervisor(config, rendezvous.token))
    nbytes = sum(numel * getattr(torch, dtype).itemsize for dtype, numel in spec.flats)
    strategy = " ".join([spec.strategy, *changed(spec.strategy, spec.settings)])
    console.tell(f"training: {strategy}, a model of {size(nbytes)}")
    try:
        for supervisor in supervisors:
            supervisor.wait()
    except KeyboardInterrupt:
        console.tell(f"interrupted: workers lose their server; the last snapshots stay in {snapshots}")
        for supervisor in supervisors:
            supervisor.stop(0.0)
        raise typer.Exit(130) from None
    if any(supervisor.failed for supervisor in supervisors):
        raise LaunchError("a shard cannot continue; its error is printed above")
    console.say("all workers have left")


def _listen(listen: str, shards: int, workers: int | None, replicate: bool, token: bytes) -> Rendezvous:
    """Listen at this address only, for workers and further servers."""
    from offbeat.worlds.processes.server.bootstrap import Rendezvous, check_second, parse_address
    from offbeat.worlds.processes.server.shard_count import asked_pieces

    host, tcp_port = parse_address(listen)
    if workers is None or workers < 1:
        raise SettingError("--workers N: give the number of workers that must join before training begins")
    if shards < 1:
        raise SettingError(f"--shards {shards}: at least 1 is needed")
    if replicate:
        check_second(shards)
    numbers = {"workers": workers, "shards": shards, "pieces": asked_pieces("1"), "replicate": int(replicate)}
    return Rendezvous.start(host, tcp_port, token, **numbers)
