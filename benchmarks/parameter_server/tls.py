"""How much speed does encryption cost?

    python -m benchmarks run tls

One worker and one shard on two hosts at 1 Gbit/s push and pull a model of 40 MB, through TLS and plain in
turn. Goal: through TLS at least 0.97 of the plain rate. On loopback, where connections are plain by default,
the table shows how fast one core encrypts.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from threading import Thread

import torch

from benchmarks.parameter_server.server import RATE, WIRE_NUMEL, measure_rates
from benchmarks.support.hosts import Hosts
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, interval
from offbeat.worlds.processes.server.connection import Connection
from offbeat.worlds.processes.server.tls import Certificate

GOAL = 0.97


def measure_hosts(table: Table, repeats: int, rounds: int) -> None:
    """Add the rows of two hosts: pairs of runs, plain and through TLS, the order in turn."""
    ratios: dict[str, list[float]] = {"push": [], "pull": []}
    rates: dict[tuple[str, bool], list[float]] = {}
    with Hosts(count=2, rate=RATE) as hosts:
        table.note(hosts.describe_link())
        for repeat in range(repeats):
            pair = {}
            for insecure in (True, False) if repeat % 2 else (False, True):
                pair[insecure] = measure_rates(hosts, rounds, insecure)
            for place, name in enumerate(ratios):
                ratios[name].append(pair[False][place] / pair[True][place])
                for insecure in pair:
                    rates.setdefault((name, insecure), []).append(pair[insecure][place])
    for name, values in ratios.items():
        plain, encrypted = (statistics.median(rates[name, insecure]) / 1e6 for insecure in (True, False))
        result = f"{statistics.median(values):.3f} of plain ({interval(values)})"
        table.row(
            f"{name} of 40 MB at {RATE}", f"{plain:.1f} MB/s", f"{encrypted:.1f} MB/s", result, f"≥ {GOAL}"
        )


def measure_loopback(table: Table, rounds: int) -> None:
    """Add the row of one connection between two threads: both ends encrypt on the same machine."""
    plain, encrypted = (statistics.median(_transfer(tls, rounds)) / 1e9 for tls in (False, True))
    ratio = f"{encrypted / plain:.2f} of plain"
    table.row("one connection, loopback", f"{plain:.2f} GB/s", f"{encrypted:.2f} GB/s", ratio, "–")


def _transfer(encrypted: bool, rounds: int) -> list[float]:
    """Return the bytes per second of each transfer of 40 MB."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = Connection(socket.create_connection(listener.getsockname()), 60.0)
        server = Connection(listener.accept()[0], 60.0)
    if encrypted:
        shaking = Thread(target=server.encrypt, args=(Certificate(),))
        shaking.start()
        worker.encrypt()
        shaking.join()
    sent, received = torch.ones(WIRE_NUMEL), torch.zeros(WIRE_NUMEL)
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        sending = Thread(target=worker.send, args=(sent,))
        sending.start()
        server.receive(received)
        sending.join()
        rates.append(sent.nbytes / (time.perf_counter() - began))
    for end in (worker, server):
        end.close()
    return rates


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("tls", __doc__)
    parser.add_argument("--repeats", type=int, default=4, help="pairs of runs")
    parser.add_argument("--rounds", type=int, default=12, help="pushes and pulls of a run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("tls", __doc__ or "", ["case", "plain", "TLS", "TLS / plain", "goal"])
    measure_hosts(table, options.repeats, options.rounds)
    measure_loopback(table, options.rounds)
    table.write()
