"""Cluster of one training: its servers, its hosts' launchers, a small disk, and what is done to them."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks.chaos.worker import BATCH, Job, write_whole
from benchmarks.support.hosts import INTERFACE, Hosts
from benchmarks.support.workers import wait_for_listener, worker_command

HOSTS = 4
WORKERS = 8
TCP_PORT = 29600
SNAPSHOT_S = 5.0
DISK_MB = 16
START_S = 600.0  # for all workers to take their first step
END_S = 120.0  # for all workers to end
STEPS_MORE = 40  # steps after which elastic workers end together
HANG_S = 60.0  # without a step, after which a worker hangs


class Cluster:
    """Servers and workers of one job on the emulated hosts."""

    def __init__(self, hosts: Hosts, job: Job) -> None:
        self.hosts, self.job = hosts, job
        self.folder = Path(job.folder)
        self.hangs = self.lost = 0
        self.killed_workers = self.killed_shards = self.cuts = self.fills = 0
        self._env = {**os.environ, "OFFBEAT_TOKEN": secrets.token_hex(8), "OMP_NUM_THREADS": "1"}
        self._env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._servers: list[subprocess.Popen[str]] = []
        self._launchers: list[subprocess.Popen[str]] = []
        self._disk = self.folder / "disk"
        self._cut: set[int] = set()
        self._resident: dict[str, dict[int, list[int]]] = {"shards": {}, "workers": {}}

    # --- start and end

    def __enter__(self) -> Cluster:
        self._disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "offbeat-chaos", str(self._disk)]
        subprocess.run(mount, check=True)
        try:
            self._start_store()
            for host in range(HOSTS):
                command = worker_command("chaos", "--launcher", self.job.text())
                self._launchers.append(self._popen(host, command))
            for slot in range(WORKERS):
                self._order(slot, "start")
            self._wait(
                lambda: all(self._latest_s(slot) > 0 for slot in range(WORKERS)), START_S, "have taken a step"
            )
            write_whole(self.job.began, str(time.time()))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self._launchers, *self._servers]:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.hosts.kill_all()
        for host in list(self._cut):
            self.reconnect(host)
        subprocess.run(["umount", "-l", str(self._disk)], check=False)

    def finish(self) -> list[float]:
        """End the training once all workers are back; return their final accuracies."""
        calm_s = time.time()
        self._await(lambda slot: self._latest_s(slot) > calm_s)
        clock = max((self._latest(slot)[1] for slot in range(WORKERS)), default=0)
        write_whole(self.job.stop, str(clock + STEPS_MORE))
        self._await(lambda slot: self.job.result(slot).exists())
        results = [self.job.result(slot) for slot in range(WORKERS)]
        return [float(path.read_text()) for path in results if path.exists()]

    def _await(self, arrived: Callable[[int], bool]) -> None:
        """Wait for all workers; those that do not arrive hang."""
        try:
            self._wait(lambda: all(map(arrived, range(WORKERS))), END_S, "arrive")
        except TimeoutError as late:
            print(late, flush=True)
            self.hangs += sum(not arrived(slot) for slot in range(WORKERS))

    def _start_store(self) -> None:
        """Start the server's shards, one on each host; or the store in which elastic workers meet."""
        first = self.job.address
        if self.job.elastic:
            self._servers.append(self._popen(0, [sys.executable, "-m", "offbeat", "rendezvous", first]))
            wait_for_listener(first, self._on(0))
            return
        serve = [sys.executable, "-m", "offbeat", "serve", "--every", str(SNAPSHOT_S)]
        serve += ["--snapshots", str(self._disk / "snapshots")]
        count = ["--workers", str(WORKERS), "--shards", str(HOSTS), "--here", "1", "--replicate"]
        for host in range(HOSTS):
            where = ["--join", first] if host else ["--listen", first, *count]
            self._servers.append(self._popen(host, [*serve, *where]))
            wait_for_listener(first, self._on(0))

    def _on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.hosts.namespace(host)]

    def _popen(self, host: int, command: list[str]) -> subprocess.Popen[str]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*self._on(host), *command],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )

    def _order(self, slot: int, order: str) -> None:
        """Tell the launcher of a worker's host what to do with it."""
        launcher = self._launchers[slot % HOSTS]
        assert launcher.stdin is not None
        with suppress(BrokenPipeError):
            launcher.stdin.write(f"{order} {slot}\n")
            launcher.stdin.flush()

    def _wait(self, true: Callable[[], bool], patience_s: float, what: str) -> None:
        deadline = time.monotonic() + patience_s
        while not true():
            if time.monotonic() > deadline:
                tail = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"not all workers {what} within {patience_s:.0f} s; their output:\n{tail}")
            time.sleep(0.2)

    # --- what is done to them

    def kill_worker(self, slot: int) -> None:
        """Kill a worker; its launcher starts it again."""
        self._order(slot, "kill")
        self.killed_workers += 1

    def kill_shard(self, host: int) -> None:
        """Kill a host's shard; its supervisor starts it again."""
        for pid in self._shards(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed_shards += 1

    def cut_off(self, host: int) -> None:
        """Take a host's link down."""
        self._set_link(host, "down")
        self._cut.add(host)
        self.cuts += 1

    def reconnect(self, host: int) -> None:
        """Take a host's link up again."""
        self._set_link(host, "up")
        self._cut.discard(host)

    def _set_link(self, host: int, state: str) -> None:
        command = ["ip", "-n", self.hosts.switch, "link", "set", f"port{host}", state]
        subprocess.run(command, check=False)

    def fill_disk(self) -> None:
        """Leave no room on the disk of the snapshots."""
        with suppress(OSError), (self._disk / "filling").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self.fills += 1

    def free_disk(self) -> None:
        """Make room again."""
        (self._disk / "filling").unlink(missing_ok=True)

    def end_hangs(self) -> None:
        """Count and kill workers that have taken no step for long, on hosts that are not cut off."""
        for slot in range(WORKERS):
            if slot % HOSTS not in self._cut and time.time() - self._latest_s(slot) > HANG_S:
                self.hangs += 1
                print(f"worker {slot} hangs", flush=True)
                self._order(slot, "kill")
                with self.job.log(slot).open("a") as log:
                    log.write(f"{time.time():.3f} 0 nan\n")  # so that it is counted once

    # --- what is seen of them

    def steps_between(self, began_s: float, ended_s: float) -> int:
        """Return the steps that all workers have taken in a span of time."""
        times = [float(line.split()[0]) for slot in range(WORKERS) for line in self._lines(slot)]
        return sum(began_s <= at_s < ended_s for at_s in times)

    def samples_per_s(self, began_s: float, ended_s: float) -> float:
        """Return the samples per second in a span of time."""
        return BATCH * self.steps_between(began_s, ended_s) / (ended_s - began_s)

    def note_memory(self) -> None:
        """Note the resident memory of all shards and workers."""
        shards = [pid for host in range(len(self._servers)) for pid in self._shards(host)]
        workers = [pid for launcher in self._launchers for pid in _children(launcher.pid)]
        for kind, pids in (("shards", shards), ("workers", workers)):
            for pid in pids:
                with suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/status").read_text()
                    self._resident[kind].setdefault(pid, []).append(
                        int(text.partition("VmRSS:")[2].split()[0])
                    )

    def growth_mb(self, kind: str) -> float:
        """Return the most that a process has grown after the first third of its life, in MB."""
        grown = [sizes[-1] - sizes[len(sizes) // 3] for sizes in self._resident[kind].values() if sizes[6:]]
        return max(grown, default=0) / 1000

    def lost_updates(self) -> int:
        """Return how many acknowledged updates the shards have said to be lost."""
        log = (self.folder / "log").read_text(errors="replace")
        return sum(map(int, re.findall(r"(\d+) updates of worker \d+ since", log)))

    def _shards(self, host: int) -> list[int]:
        return [] if self.job.elastic else _children(self._servers[host].pid)

    def _lines(self, slot: int) -> list[str]:
        log = self.job.log(slot)
        return log.read_text().splitlines() if log.exists() else []

    def _latest(self, slot: int) -> tuple[float, int]:
        """Return when a worker took its latest step, and its clock then."""
        for line in reversed(self._lines(slot)):
            parts = line.split()
            if len(parts) == 3:
                return float(parts[0]), int(parts[1])
        return 0.0, 0

    def _latest_s(self, slot: int) -> float:
        return self._latest(slot)[0]


def _children(pid: int) -> list[int]:
    ps = ["ps", "--ppid", str(pid), "-o", "pid="]
    return [int(each) for each in subprocess.run(ps, capture_output=True, text=True).stdout.split()]
