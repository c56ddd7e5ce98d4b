"""Worker processes of a benchmark: the command that starts one, and what the workers exchange."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.hosts import Hosts

LISTEN_S = 300.0  # how long a server may take until it listens


def worker_command(benchmark: str, *options: object) -> list[str]:
    """Return the command that runs a benchmark with these options in another process."""
    return [sys.executable, "-m", "benchmarks", "run", benchmark, *map(str, options)]


def run_on_hosts(hosts: Hosts, benchmark: str, *options: object, timeout: float) -> Any:
    """Run a benchmark's worker on every host; return the JSON that host 0 printed last."""
    output = hosts.run(worker_command(benchmark, *options), timeout=timeout, echo=False)
    return json.loads(output.splitlines()[-1])


def gather_rows(values: Sequence[float]) -> list[list[float]]:
    """Gather one row of numbers from every rank, in the order of the ranks."""
    own = torch.tensor(values, dtype=torch.float64)
    rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [row.tolist() for row in rows]


def slowest(seconds: float) -> float:
    """Return the largest value over all ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def wait_for_listener(address: str, prefix: Sequence[str] = ()) -> None:
    """Wait until a server accepts connections at `host:port`; `prefix` runs the check on an emulated host."""
    host, port = address.split(":")
    check = f"import socket; socket.create_connection(({host!r}, {port}), 1).close()"
    deadline = time.monotonic() + LISTEN_S
    while subprocess.run([*prefix, sys.executable, "-c", check], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no server listens at {address} after {LISTEN_S:.0f} s")
        time.sleep(0.1)
