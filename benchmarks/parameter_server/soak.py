"""Does training survive ten minutes of crashes?

    python -m benchmarks run soak [--minutes 10]

Four emulated hosts, each with a worker and a shard of a dedicated server, train `digits` under SSP(3). Every
10 seconds a worker is killed with SIGKILL and restarted; a shard is killed twice; one host's link is down for
20 s. Each worker logs which updates the server has acknowledged. Goals: the loss keeps falling; no update
acknowledged before a snapshot is missing from it; the servers' file descriptors, threads and memory do not
grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import offbeat
from benchmarks.support.hosts import INTERFACE, Hosts
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table
from benchmarks.support.workers import wait_for_listener, worker_command
from offbeat.experiments.tasks.digits import Digits
from offbeat.worlds.processes.emulation import pace
from offbeat.worlds.processes.server.snapshot_file import FORMAT

HOSTS = 4
RATE = "1gbit"
TCP_PORT = 29600
KILL_EVERY_S = 10.0
SNAPSHOT_S = 5.0
LINK_DOWN_S = 20.0
TIMEOUT_S = 90.0
PACE_S = 0.05


def work(log: Path, stop: Path) -> None:
    """Train as a standalone worker until `stop` exists; log the clocks that the server acknowledged."""
    torch.set_num_threads(1)
    task = Digits()
    data = task.load()
    torch.manual_seed(0)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    pace(model, PACE_S)  # longer than the real computation: eight processes share the machine's cores
    order = torch.Generator().manual_seed(os.getpid())
    with offbeat.attach(model, optimizer, offbeat.SSP(staleness=3), timeout_s=TIMEOUT_S) as sync:
        server: Any = sync.port.client
        with log.open("a", buffering=1) as lines:
            while not stop.exists():
                batch = data.batch(torch.randint(len(data), (32,), generator=order))
                optimizer.zero_grad()
                loss = task.loss(model, batch)
                loss.backward()
                optimizer.step()
                clocks = [channel.clock for channel in server.transport.channels]
                lines.write(json.dumps([time.time(), server.worker, loss.item(), clocks]) + "\n")
        if sync.port.rank == 0:
            with sync.consensus():
                print(json.dumps({"accuracy": task.evaluate(model, data)}))


@dataclass
class Cluster:
    """Servers and workers on the hosts, with the failures injected so far."""

    hosts: Hosts
    folder: Path
    env: dict[str, str]
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    running: dict[int, Path] = field(default_factory=dict)  # log of each host's latest worker
    killed_workers: int = 0
    killed_shards: int = 0
    # by shard: time of its last snapshot before the crash, time of the crash
    crashes: dict[int, tuple[float, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def start(self, host: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output goes to the file `log`."""
        full = ["ip", "netns", "exec", self.hosts.namespace(host), *command]
        log = (self.folder / "log").open("ab")
        return subprocess.Popen(full, env=self.env, stdout=log, stderr=log)

    def start_servers(self) -> None:
        """Start one shard on each host; the first one tells the others and the workers where to connect."""
        first = f"{self.hosts.address(0)}:{TCP_PORT}"
        for host in range(HOSTS):
            where = ["--listen", first, "--workers", str(HOSTS), "--shards", str(HOSTS), "--here", "1"]
            if host:
                wait_for_listener(first, ["ip", "netns", "exec", self.hosts.namespace(0)])
                where = ["--join", first]
            snapshots = ["--snapshots", str(self.folder / "snapshots"), "--every", str(SNAPSHOT_S)]
            command = [sys.executable, "-m", "offbeat", "serve", *where, *snapshots]
            self.servers.append(self.start(host, command))
        self.env["OFFBEAT_SERVER"] = first

    def start_worker(self, host: int) -> subprocess.Popen[bytes]:
        """Start a worker on a host, with a new log."""
        log = self.folder / f"worker-{len(self.logs)}"
        self.logs.append(log)
        self.running[host] = log
        return self.start(host, worker_command("soak", "--worker", log, self.folder / "stop"))

    def wait_for_first_steps(self) -> None:
        """Wait until every running worker has taken a step."""
        deadline = time.monotonic() + 2 * TIMEOUT_S
        while not all(path.exists() and path.stat().st_size for path in self.running.values()):
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.2)

    def kill_worker(self, host: int) -> None:
        """Kill a host's worker and start another."""
        self.workers[host].send_signal(signal.SIGKILL)
        self.workers[host].wait()
        self.killed_workers += 1
        self.workers[host] = self.start_worker(host)

    def shard_pid(self, host: int) -> int:
        """Return the pid of the shard, a child of the host's server process."""
        ps = ["ps", "--ppid", str(self.servers[host].pid), "-o", "pid="]
        return int(subprocess.run(ps, capture_output=True, text=True, check=True).stdout.split()[0])

    def kill_shard(self, host: int) -> None:
        """Kill a host's shard, which its supervisor restarts; check the snapshot it restarts from."""
        os.kill(self.shard_pid(host), signal.SIGKILL)
        self.killed_shards += 1
        killed_at = time.time()
        self.missing += missing_from_snapshot(self, host)  # before the next snapshot replaces it
        self.crashes[host] = (_snapshot(self, host)["at"], killed_at)

    def set_link(self, host: int, state: str) -> None:
        """Set a host's link "up" or "down"."""
        command = f"ip -n {self.hosts.switch} link set port{host} {state}"
        subprocess.run(command.split(), check=True)

    def resources(self) -> list[dict[str, int]]:
        """Return the file descriptors, threads and resident KB of every shard."""
        used = []
        for host in range(HOSTS):
            process = Path(f"/proc/{self.shard_pid(host)}")
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            used.append(
                {
                    "descriptors": len(list((process / "fd").iterdir())),
                    "threads": int(status["Threads"]),
                    "resident_kb": int(status["VmRSS"].split()[0]),
                }
            )
        return used

    def entries(self) -> list[list[list[Any]]]:
        """Return the complete lines of the logs, by worker."""
        return [_lines(log) for log in self.logs if log.exists()]

    def kill_all(self) -> None:
        """Kill all servers and workers that still run."""
        for process in [*self.workers, *self.servers]:
            if process.poll() is None:
                process.kill()
                process.wait()


def _lines(log: Path) -> list[list[Any]]:
    lines = []
    for line in log.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:  # the last line of a worker that was killed
            continue
    return lines


def _snapshot(cluster: Cluster, shard: int) -> dict[str, Any]:
    """Return when a shard's last snapshot was written, and the clocks of the pushes in it."""
    with (cluster.folder / "snapshots" / f"shard-{shard}").open("rb") as file:
        file.seek(len(FORMAT))
        header = json.loads(file.readline())
    return {"at": header["at"], "applied": dict(header["applied"])}


def missing_from_snapshot(cluster: Cluster, shard: int) -> list[str]:
    """List the updates acknowledged before the shard's snapshot that are missing from it.

    A crash loses the updates acknowledged after the last snapshot. A worker that reconnects is told, and its
    clock continues as if they were applied. A worker that died before it reconnected (nothing acknowledged
    since the crash) is checked against the snapshot before the crash.
    """
    missing = []
    saved = _snapshot(cluster, shard)
    begun, applied = saved["at"], saved["applied"]
    kept_at, killed_at = cluster.crashes.get(shard, (begun, begun))
    for lines in cluster.entries():
        until_crash = [line for line in lines if line[0] < killed_at]
        came_back = not until_crash or lines[-1][3][shard] > until_crash[-1][3][shard]
        before = [line for line in lines if line[0] < (begun if came_back else kept_at)]
        if before:
            worker, clock = before[-1][1], before[-1][3][shard]
            if applied.get(worker, 0) < clock:
                missing.append(f"shard {shard} has {applied.get(worker, 0)} of worker {worker}'s {clock}")
    return missing


def mean_losses(cluster: Cluster, parts: int = 6) -> list[float]:
    """Return the mean loss in each of `parts` equal parts of the run."""
    points = sorted((line[0], line[2]) for lines in cluster.entries() for line in lines)
    size = max(1, len(points) // parts)
    chunks = [points[i : i + size] for i in range(0, size * parts, size)]
    return [sum(loss for _, loss in chunk) / len(chunk) for chunk in chunks if chunk]


def soak(cluster: Cluster, seconds: float, table: Table) -> list[dict[str, int]]:
    """Inject failures for `seconds`; return the shards' resources after a fifth of the time."""
    rng = random.Random(0)
    start = time.monotonic()
    early: list[dict[str, int]] = []
    shard_kills = [0.3 * seconds, 0.7 * seconds]
    down_at, down_until = 0.5 * seconds, 0.0
    next_kill = start + KILL_EVERY_S
    while (now := time.monotonic() - start) < seconds:
        time.sleep(0.2)
        if not early and now > 0.2 * seconds:
            cluster.wait_for_first_steps()  # otherwise connections of restarting workers would be missing
            early = cluster.resources()
            next_kill = time.monotonic() + KILL_EVERY_S
        if shard_kills and now > shard_kills[0]:
            shard_kills.pop(0)
            victim = rng.randrange(HOSTS)
            cluster.kill_shard(victim)
            table.note(f"{now:.0f} s: the shard on host {victim} is killed")
        if down_at and now > down_at:
            down_at, down_until = 0.0, now + LINK_DOWN_S
            cluster.set_link(HOSTS - 1, "down")
            table.note(f"{now:.0f} s: the link of host {HOSTS - 1} is down for {LINK_DOWN_S:.0f} s")
        if down_until and now > down_until:
            down_until = 0.0
            cluster.set_link(HOSTS - 1, "up")
        if time.monotonic() > next_kill and not down_until:
            next_kill += KILL_EVERY_S
            cluster.kill_worker(rng.randrange(HOSTS))
            print(f"{now:.0f} s: {cluster.killed_workers} workers killed", end="\r", flush=True)
        for host, worker in enumerate(cluster.workers):
            if worker.poll() is not None:
                table.note(
                    f"{now:.0f} s: the worker on host {host} exited by itself with code {worker.returncode}"
                )
                cluster.workers[host] = cluster.start_worker(host)
    return early


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(*options.worker)
        return
    table = Table("soak", __doc__ or "", ["what", "result", "goal"])
    env = {**os.environ, "OFFBEAT_TOKEN": secrets.token_hex(8), "OMP_NUM_THREADS": "1"}
    env["GLOO_SOCKET_IFNAME"] = INTERFACE
    with tempfile.TemporaryDirectory() as folder, Hosts(count=HOSTS, rate=RATE) as hosts:
        cluster = Cluster(hosts, Path(folder), env)
        try:
            cluster.start_servers()
            cluster.workers = [cluster.start_worker(host) for host in range(HOSTS)]
            cluster.wait_for_first_steps()
            early = soak(cluster, 60 * options.minutes, table)
            cluster.wait_for_first_steps()
            late = cluster.resources()
            cluster.missing += [m for shard in range(HOSTS) for m in missing_from_snapshot(cluster, shard)]
            (cluster.folder / "stop").touch()
            ends = [worker.wait(TIMEOUT_S) for worker in cluster.workers]
            ends += [server.wait(TIMEOUT_S) for server in cluster.servers]
            log = (cluster.folder / "log").read_text()
        finally:
            cluster.kill_all()
        losses = mean_losses(cluster)
        steps = sum(len(lines) for lines in cluster.entries())
        table.row(
            "workers killed and restarted", str(cluster.killed_workers), f"one every {KILL_EVERY_S:.0f} s"
        )
        table.row("shards killed", str(cluster.killed_shards), "2")
        table.row("steps acknowledged", str(steps), "training goes on")
        table.row("mean loss in each sixth of the time", " ".join(f"{x:.3f}" for x in losses), "falling")
        table.row(
            "acknowledged before a snapshot, missing from it", "; ".join(cluster.missing) or "none", "none"
        )
        for what in ("descriptors", "threads", "resident_kb"):
            before, after = (" ".join(str(each[what]) for each in used) for used in (early, late))
            table.row(
                f"{what} of the shards, after a fifth of the time → at the end",
                f"{before} → {after}",
                "no growth",
            )
        table.row("exit codes", " ".join(map(str, ends)), "0")
        lost = [line for line in log.splitlines() if "are lost" in line]
        table.row("lost updates logged by restarted shards", "; ".join(lost) or "none", "≤ 5 s of updates")
        accuracies = re.findall(r'{"accuracy": ([0-9.]+)}', log)
        table.row("final accuracy", ", ".join(accuracies) or "unknown", "")
    table.write()
