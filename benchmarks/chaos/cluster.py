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
from typing import Any

from benchmarks.chaos.job import HOSTS, WORKERS, Event, Events, Job, write_whole
from benchmarks.chaos.phases import median, pauses, returns
from benchmarks.support.hosts import INTERFACE, Hosts
from benchmarks.support.workers import wait_for_listener, worker_command

TCP_PORT = 29600
SNAPSHOT_S = 5.0
DISK_MB = 16
START_S = 600.0  # for all workers to take their first step
END_S = 120.0  # for all workers to end
STEPS_MORE = 40  # steps after which elastic workers end together
HANG_S = 60.0  # without a step, after which a worker hangs
# torchft's lighthouse: it looks every 10 ms, a replica without a heartbeat for 1 s is lost (its defaults are
# 100 ms and 5 s), and a quorum waits for 1 s for replicas that have not asked yet (60 s).
LIGHTHOUSE = ["--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000"]
WITHIN_S = 4.0  # after a kill, in which the others' longest step is looked for


class Cluster:
    """Servers and workers of one job on the emulated hosts."""

    def __init__(self, hosts: Hosts, job: Job, python: str = sys.executable) -> None:
        """`python`: the interpreter of the workers."""
        self.hosts, self.job = hosts, job
        self.folder = Path(job.folder)
        self.events = Events(job)
        self.hangs = self.cuts = self.fills = 0
        self.shard_kills_s: list[float] = []
        self._python = python
        self._env = {**os.environ, "OFFBEAT_TOKEN": secrets.token_hex(8), "OMP_NUM_THREADS": "1"}
        self._env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._servers: list[subprocess.Popen[str]] = []
        self._launchers: list[subprocess.Popen[str]] = []
        self._disk = self.folder / "disk"
        self._cut: set[int] = set()
        self._resident: dict[str, dict[int, list[int]]] = {"shards": {}, "workers": {}, "keepers": {}}

    # --- start and end

    def __enter__(self) -> Cluster:
        self._disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "offbeat-chaos", str(self._disk)]
        subprocess.run(mount, check=True)
        try:
            self._start_store()
            for host in range(HOSTS):
                command = [self._python, *worker_command("chaos", "--launcher", self.job.text())[1:]]
                self._launchers.append(self._popen(host, command))
            for slot in range(WORKERS):
                self.order(slot, "start")
            self._wait(lambda: all(map(self._latest_s, range(WORKERS))), START_S, "have taken a step")
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
        clock = max(self.events.latest_step(slot).clock for slot in range(WORKERS))
        write_whole(self.job.stop, str(clock + STEPS_MORE))
        self._await(lambda slot: self.job.result(slot).exists())
        results = [self.job.result(slot) for slot in range(WORKERS)]
        return [float(path.read_text()) for path in results if path.exists()]

    def _await(self, arrived: Callable[[int], bool]) -> None:
        """Wait for all workers; those that do not arrive hang."""
        try:
            self._wait(lambda: all(map(arrived, range(WORKERS))), END_S, "arrive")
        except TimeoutError as late:
            self.hangs += sum(not arrived(slot) for slot in range(WORKERS))
            print(f"{self.hangs} hangs: {late}", flush=True)

    def _start_store(self) -> None:
        """Start the server's shards, one on each host; or the store in which elastic workers meet."""
        first = self.job.address
        if self.job.peer:
            bind = ["--bind", f"[::]:{TCP_PORT}", "--min_replicas", "1", *LIGHTHOUSE]
            lighthouse = str(Path(self._python).parent / "torchft_lighthouse")
            self._servers.append(self._popen(0, [lighthouse, *bind]))
            wait_for_listener(first, self._on(0))
            return
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

    def order(self, slot: int, order: str) -> None:
        """Tell the launcher of a worker's host what to do with it."""
        launcher = self._launchers[slot % HOSTS]
        assert launcher.stdin is not None
        with suppress(BrokenPipeError):
            launcher.stdin.write(f"{order} {slot}\n")
            launcher.stdin.flush()

    def _wait(self, true: Callable[[], bool], patience_s: float, what: str) -> None:
        deadline = time.monotonic() + patience_s
        while not self._holds(true):
            if time.monotonic() > deadline:
                tail = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"not all workers {what} within {patience_s:.0f} s; their output:\n{tail}")
            time.sleep(0.2)

    def _holds(self, true: Callable[[], bool]) -> bool:
        self.events.update()
        return true()

    # --- what is done to them

    def kill_worker(self, slot: int) -> None:
        """Kill a worker; its launcher starts it again."""
        self.order(slot, "kill")

    def set_progress(self, fraction: float, pace_s: float) -> None:
        """Let the workers know which fraction of the samples is trained, and how long a step takes."""
        write_whole(self.job.progress, f"{fraction:.6f} {pace_s}")

    def kill_shard(self, host: int) -> None:
        """Kill a host's shard; its supervisor starts it again."""
        for pid in self._shards(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.shard_kills_s.append(time.time())

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
                self.order(slot, "kill")
                with self.job.log(slot).open("a") as log:
                    log.write(Event(time.time(), "step").line())  # so that it is counted once

    # --- what is seen of them

    def note_memory(self) -> None:
        """Note the resident memory of all shards and workers."""
        shards = [pid for host in range(len(self._servers)) for pid in self._shards(host)]
        workers = [pid for launcher in self._launchers for pid in _children(launcher.pid)]
        keepers = [process.pid for process in (*self._launchers, *self._servers)]
        for kind, pids in (("shards", shards), ("workers", workers), ("keepers", keepers)):
            for pid in pids:
                with suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/status").read_text()
                    self._resident[kind].setdefault(pid, []).append(
                        int(text.partition("VmRSS:")[2].split()[0])
                    )

    def growth_mb(self, kind: str) -> float:
        """Return the most that a process has grown in the second half of its life, in MB."""
        grown = [sizes[-1] - sizes[len(sizes) // 2] for sizes in self._resident[kind].values() if sizes[7:]]
        return max(grown, default=0) / 1000

    def lost_updates(self) -> int:
        """Return how many acknowledged updates the shards have said to be lost."""
        log = (self.folder / "log").read_text(errors="replace")
        return sum(map(int, re.findall(r"(\d+) updates of worker \d+ since", log)))

    def outcome(self) -> dict[str, Any]:
        """Return what was counted, as plain numbers."""
        self.events.update()
        kills_s = [event.at_s for own in self.events.of.values() for event in own if event.name == "killed"]
        return {
            "hangs": self.hangs,
            "lost": self.lost_updates(),
            "killed": [len(kills_s), len(self.shard_kills_s), self.cuts, self.fills],
            "grown_mb": [self.growth_mb(kind) for kind in self._resident],
            "returned_s": {phase: median(found) for phase, found in returns(self.events.of).items()},
            "paused_s": median(pauses(self.events.of, kills_s, WITHIN_S)),
            "paused_by_shard_s": median(pauses(self.events.of, self.shard_kills_s, 4 * WITHIN_S)),
        }

    def _shards(self, host: int) -> list[int]:
        """Return the process of a host's shard; the later children of its supervisor are spares."""
        return _children(self._servers[host].pid)[:1] if self.job.served else []

    def _latest_s(self, slot: int) -> float:
        return self.events.latest_step(slot).at_s


def _children(pid: int) -> list[int]:
    ps = ["ps", "--ppid", str(pid), "--sort", "start_time", "-o", "pid="]
    return [int(each) for each in subprocess.run(ps, capture_output=True, text=True).stdout.split()]
