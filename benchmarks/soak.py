"""Does training live through ten minutes of deaths?

    python -m benchmarks.soak [--minutes 10]

On 4 shaped hosts with a shard of a dedicated server and a worker each, training `digits` under SSP(3): every
10 seconds a worker is killed with SIGKILL and brought back, twice in the course a shard is, and once a host's
link is taken down for 20 s. Each worker writes down what the server acknowledged. In the end: the loss must
have kept falling; no update that was acknowledged before a snapshot may be missing from it; the servers' file
descriptors, threads and memory must not have grown.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import offbeat
from benchmarks.hosts import CARD, Hosts
from benchmarks.tables import Table
from offbeat.experiments.tasks.digits import Digits
from offbeat.worlds.processes.emulation import pace

HOSTS = 4
RATE = "1gbit"
PORT = 29600
KILL_EVERY_S = 10.0
SNAPSHOT_S = 5.0
DOWN_S = 20.0
TIMEOUT_S = 90.0
PACE_S = 0.05


def work(journal: Path, stop: Path) -> None:
    """A worker that came by itself; it trains until told to stop, and writes down what was acknowledged."""
    torch.set_num_threads(1)
    task = Digits()
    data = task.load()
    torch.manual_seed(0)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    pace(model, PACE_S)  # as if there were something to compute: eight processes share the machine's cores
    order = torch.Generator().manual_seed(os.getpid())
    with offbeat.attach(model, optimizer, offbeat.SSP(staleness=3), timeout_s=TIMEOUT_S) as sync:
        client: Any = sync.port.client
        with journal.open("a", buffering=1) as lines:
            while not stop.exists():
                batch = data.batch(torch.randint(len(data), (32,), generator=order))
                optimizer.zero_grad()
                loss = task.loss(model, batch)
                loss.backward()
                optimizer.step()
                clocks = [channel.clock for channel in client.transport.channels]
                lines.write(json.dumps([time.time(), client.worker, loss.item(), clocks]) + "\n")
        if sync.port.rank == 0:
            with sync.consensus():
                print(json.dumps({"accuracy": task.evaluate(model, data)}))


@dataclass
class Scene:
    """The hosts, what runs on them, and what was done to it."""

    hosts: Hosts
    folder: Path
    env: dict[str, str]
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)
    running: dict[int, Path] = field(default_factory=dict)  # the journal of each host's latest worker
    killed_workers: int = 0
    killed_shards: int = 0
    crashes: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # of shards: their last snapshot, when
    missing: list[str] = field(default_factory=list)

    def start(self, host: int, *command: str) -> subprocess.Popen[bytes]:
        full = ["ip", "netns", "exec", self.hosts.namespace(host), sys.executable, "-m", *command]
        log = (self.folder / "log").open("ab")
        return subprocess.Popen(full, env=self.env, stdout=log, stderr=log)

    def serve(self) -> None:
        first = f"{self.hosts.address(0)}:{PORT}"
        for host in range(HOSTS):
            where = ["--listen", first, "--workers", str(HOSTS), "--shards", str(HOSTS), "--here", "1"]
            if host:
                self._await_desk()
                where = ["--join", first]
            kept = ["--snapshots", str(self.folder / "snapshots"), "--every", str(SNAPSHOT_S)]
            self.servers.append(self.start(host, "offbeat", "serve", *where, *kept))
        self.env["OFFBEAT_SERVER"] = first

    def _await_desk(self) -> None:
        probe = f"import socket; socket.create_connection(({self.hosts.address(0)!r}, {PORT}), 1).close()"
        command = ["ip", "netns", "exec", self.hosts.namespace(0), sys.executable, "-c", probe]
        deadline = time.monotonic() + 60
        while subprocess.run(command, capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError("the server does not listen")
            time.sleep(0.2)

    def bring(self, host: int) -> subprocess.Popen[bytes]:
        journal = self.folder / f"worker-{len(self.journals)}"
        self.journals.append(journal)
        self.running[host] = journal
        return self.start(host, "benchmarks.soak", "--worker", str(journal), str(self.folder / "stop"))

    def await_all(self) -> None:
        """Until everybody who runs has taken a step."""
        deadline = time.monotonic() + 2 * TIMEOUT_S
        while not all(path.exists() and path.stat().st_size for path in self.running.values()):
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.2)

    def kill_worker(self, host: int) -> None:
        self.workers[host].send_signal(signal.SIGKILL)
        self.workers[host].wait()
        self.killed_workers += 1
        self.workers[host] = self.bring(host)

    def shard_pid(self, host: int) -> int:
        ps = ["ps", "--ppid", str(self.servers[host].pid), "-o", "pid="]
        return int(subprocess.run(ps, capture_output=True, text=True, check=True).stdout.split()[0])

    def kill_shard(self, host: int) -> None:
        os.kill(self.shard_pid(host), signal.SIGKILL)
        self.killed_shards += 1
        killed_at = time.time()
        self.missing += missing_from_snapshot(self, host)  # before the next one takes its place
        self.crashes[host] = (_snapshot(self, host)["at"], killed_at)

    def link(self, host: int, state: str) -> None:
        command = f"ip -n {self.hosts.switch} link set port{host} {state}"
        subprocess.run(command.split(), check=True)

    def weight(self) -> list[dict[str, int]]:
        """File descriptors, threads and resident KB of every shard."""
        weights = []
        for host in range(HOSTS):
            process = Path(f"/proc/{self.shard_pid(host)}")
            status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            weights.append(
                {
                    "descriptors": len(list((process / "fd").iterdir())),
                    "threads": int(status["Threads"]),
                    "resident_kb": int(status["VmRSS"].split()[0]),
                }
            )
        return weights

    def entries(self) -> list[list[list[Any]]]:
        """The journals' lines, by worker, as far as they were written whole."""
        return [_lines(journal) for journal in self.journals if journal.exists()]

    def end(self) -> None:
        for process in [*self.workers, *self.servers]:
            if process.poll() is None:
                process.kill()
                process.wait()


def _lines(journal: Path) -> list[list[Any]]:
    lines = []
    for line in journal.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:  # the last one of a worker that was killed
            continue
    return lines


def _snapshot(scene: Scene, shard: int) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(scene.folder / "snapshots" / f"shard-{shard}", weights_only=True)
    return saved


def missing_from_snapshot(scene: Scene, shard: int) -> list[str]:
    """Updates that were acknowledged before the shard's snapshot was begun, and are not counted in it.

    A crash loses what was acknowledged after the snapshot before it; who comes back is told, and counts as if
    it were there. Of a worker that died first, with nothing acknowledged since the crash, all is due that was
    acknowledged before that snapshot.
    """
    missing = []
    saved = _snapshot(scene, shard)
    begun, applied = saved["at"], saved["applied"]
    kept_at, killed_at = scene.crashes.get(shard, (begun, begun))
    for lines in scene.entries():
        until_crash = [line for line in lines if line[0] < killed_at]
        came_back = not until_crash or lines[-1][3][shard] > until_crash[-1][3][shard]
        before = [line for line in lines if line[0] < (begun if came_back else kept_at)]
        if before:
            worker, clock = before[-1][1], before[-1][3][shard]
            if applied.get(worker, 0) < clock:
                missing.append(f"shard {shard} has {applied.get(worker, 0)} of worker {worker}'s {clock}")
    return missing


def falling(scene: Scene, parts: int = 6) -> list[float]:
    """The mean loss of each part of the time."""
    points = sorted((line[0], line[2]) for lines in scene.entries() for line in lines)
    size = max(1, len(points) // parts)
    chunks = [points[i : i + size] for i in range(0, size * parts, size)]
    return [sum(loss for _, loss in chunk) / len(chunk) for chunk in chunks if chunk]


def soak(scene: Scene, seconds: float, table: Table) -> list[dict[str, int]]:
    """Kill and bring back, for so long; what the shards weigh at the end of the first fifth."""
    dice = random.Random(0)
    began = time.monotonic()
    early: list[dict[str, int]] = []
    shard_kills = [0.3 * seconds, 0.7 * seconds]
    cut_at, cut_until = 0.5 * seconds, 0.0
    next_kill = began + KILL_EVERY_S
    while (now := time.monotonic() - began) < seconds:
        time.sleep(0.2)
        if not early and now > 0.2 * seconds:
            scene.await_all()  # or it would be lighter by the links of those who are about to come back
            early = scene.weight()
            next_kill = time.monotonic() + KILL_EVERY_S
        if shard_kills and now > shard_kills[0]:
            shard_kills.pop(0)
            victim = dice.randrange(HOSTS)
            scene.kill_shard(victim)
            table.note(f"{now:.0f} s: the shard on host {victim} is killed")
        if cut_at and now > cut_at:
            cut_at, cut_until = 0.0, now + DOWN_S
            scene.link(HOSTS - 1, "down")
            table.note(f"{now:.0f} s: the link of host {HOSTS - 1} is down for {DOWN_S:.0f} s")
        if cut_until and now > cut_until:
            cut_until = 0.0
            scene.link(HOSTS - 1, "up")
        if time.monotonic() > next_kill and not cut_until:
            next_kill += KILL_EVERY_S
            scene.kill_worker(dice.randrange(HOSTS))
            print(f"{now:.0f} s: {scene.killed_workers} workers killed", end="\r", flush=True)
        for host, worker in enumerate(scene.workers):
            if worker.poll() is not None:
                table.note(f"{now:.0f} s: the worker on host {host} ended by itself with {worker.returncode}")
                scene.workers[host] = scene.bring(host)
    return early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    table = Table("soak", __doc__ or "", ["what", "result", "goal"])
    env = {**os.environ, "OFFBEAT_TOKEN": secrets.token_hex(8), "OMP_NUM_THREADS": "1"}
    env["GLOO_SOCKET_IFNAME"] = CARD
    with tempfile.TemporaryDirectory() as folder, Hosts(count=HOSTS, rate=RATE) as hosts:
        scene = Scene(hosts, Path(folder), env)
        try:
            scene.serve()
            scene.workers = [scene.bring(host) for host in range(HOSTS)]
            scene.await_all()
            early = soak(scene, 60 * options.minutes, table)
            scene.await_all()
            late = scene.weight()
            scene.missing += [m for shard in range(HOSTS) for m in missing_from_snapshot(scene, shard)]
            (scene.folder / "stop").touch()
            ends = [worker.wait(TIMEOUT_S) for worker in scene.workers]
            ends += [server.wait(TIMEOUT_S) for server in scene.servers]
            log = (scene.folder / "log").read_text()
        finally:
            scene.end()
        losses = falling(scene)
        steps = sum(len(lines) for lines in scene.entries())
        table.row(
            "workers killed and brought back", str(scene.killed_workers), f"one in {KILL_EVERY_S:.0f} s"
        )
        table.row("shards killed", str(scene.killed_shards), "2")
        table.row("steps acknowledged", str(steps), "training goes on")
        table.row("mean loss by sixths of the time", " ".join(f"{x:.3f}" for x in losses), "falling")
        table.row(
            "acknowledged before a snapshot, missing from it", "; ".join(scene.missing) or "none", "none"
        )
        for what in ("descriptors", "threads", "resident_kb"):
            before, after = (" ".join(str(each[what]) for each in weight) for weight in (early, late))
            table.row(f"{what} of the shards, after a fifth, in the end", f"{before} → {after}", "no growth")
        table.row("exit codes in the end", " ".join(map(str, ends)), "0")
        lost = [line for line in log.splitlines() if "are lost" in line]
        table.row("losses logged by restarted shards", "; ".join(lost) or "none", "≤ what fits in 5 s")
        accuracies = re.findall(r'{"accuracy": ([0-9.]+)}', log)
        table.row("accuracy in the end", ", ".join(accuracies) or "not told", "")
    table.write()


if __name__ == "__main__":
    main()
