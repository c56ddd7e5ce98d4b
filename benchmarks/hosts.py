"""A cluster on one machine: hosts with a network card of a stated rate each, on one switch.

    python -m benchmarks.hosts --hosts 4 --rate 1gbit -- python script.py

Each host is a network namespace; the switch is a bridge in a namespace of its own, so that nothing touches
the machine's own network. A token bucket on both ends of each cable keeps the rate of what a host sends and
of what it receives. Namespaces carry their tool's pid; those of dead tools are removed at the next start.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, NoReturn

from offbeat.core.units import parse_rate
from offbeat.errors import LaunchError, OffbeatError, SettingError

CARD = "eth0"
NAMESPACES = Path("/run/netns")
PREFIX = "offbeat-"
QUEUE_S = 0.1  # of traffic may wait in front of a full link, before packets are dropped
END_S = 5.0  # to end by itself, for a process that was asked to

_serial = itertools.count()


class HostFailed(OffbeatError):
    """A host's command failed, or did not end in time; `code` is what a shell would say."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def burst_bytes(rate: float) -> int:
    """The token bucket's depth: 4 ms of traffic, at least one full segment of 64 KiB, 512 KiB at the most.

    What fits into the bucket passes at once after every pause, so a deep one makes a slow link look fast for
    short messages (512 KiB are 84 ms at 50 Mbit/s); a shallow one loses rate whenever the timer is late.
    """
    return int(min(max(rate / 8 * 0.004, 64 * 1024), 512 * 1024))


@dataclass
class Hosts:
    """`count` hosts for the time of a `with`; each sends and receives `rate` at most."""

    count: int
    rate: str | float = "1gbit"
    _name: str = field(default_factory=lambda: f"{PREFIX}{os.getpid()}-{next(_serial)}")

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 250:
            raise SettingError(f"{self.count} hosts: from 1 to 250 can be made")
        parse_rate(self.rate)

    def __enter__(self) -> Hosts:
        check_machine()
        remove_leftovers()
        try:
            self._build()
            self.set_rate(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for namespace in NAMESPACES.glob(f"{self._name}-*"):
            _remove(namespace.name)

    @property
    def switch(self) -> str:
        return f"{self._name}-switch"

    def namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        return f"10.213.0.{host + 1}"

    def set_rate(self, rate: str | float) -> None:
        """Change the rate of all links, both ways, as they stand."""
        bits = parse_rate(rate)
        shape = f"root tbf rate {bits:.0f}bit burst {burst_bytes(bits)} latency {QUEUE_S * 1e3:.0f}ms"
        for host in range(self.count):
            _call(f"tc -n {self.namespace(host)} qdisc replace dev {CARD} {shape}")
            _call(f"tc -n {self.switch} qdisc replace dev port{host} {shape}")
        self.rate = rate

    def _build(self) -> None:
        _call(f"ip netns add {self.switch}")
        _call(f"ip -n {self.switch} link add switch type bridge")
        _call(f"ip -n {self.switch} link set switch up")
        for host in range(self.count):
            own, port = self.namespace(host), f"port{host}"
            _call(f"ip netns add {own}")
            _call(f"ip -n {self.switch} link add {port} type veth peer name {CARD} netns {own}")
            _call(f"ip -n {self.switch} link set {port} master switch up")
            _call(f"ip -n {own} address add {self.address(host)}/24 dev {CARD}")
            _call(f"ip -n {own} link set {CARD} up")
            _call(f"ip -n {own} link set lo up")
            with _inside(own):  # the same everywhere; BBR, some machines' default, let 50 Mbit/s vary by 15%
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")

    def probe(self) -> tuple[float, float]:
        """Bytes per second that a plain connection gets from host 0 to host 1, and back."""
        if self.count < 2:
            raise SettingError("a probe needs two hosts")
        return self._transfer(0, 1), self._transfer(1, 0)

    def describe_link(self) -> str:
        """A probe in words, to print above what was measured on these hosts."""
        there, back = self.probe()
        return (
            f"link: {there / 1e6:.2f} MB/s there, {back / 1e6:.2f} MB/s back by one connection; nominal"
            f" {parse_rate(self.rate) / 8e6:.2f} MB/s ({self.rate}), of which headers take 4.4%"
        )

    def _transfer(self, source: int, target: int) -> float:
        bytes_s = parse_rate(self.rate) / 8
        # The bucket and the socket's buffers take the first bytes for free; bounded for links above the CPU.
        warm_up = min(int(0.4 * bytes_s) + 2 * burst_bytes(8 * bytes_s), 100_000_000)
        measured = min(int(bytes_s) + 500_000, 400_000_000)
        with _inside(self.namespace(target)):
            listener = socket.create_server((self.address(target), 0))
        with _inside(self.namespace(source)):
            sender = socket.socket()
        with listener, sender:
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                sending = threading.Thread(target=_send, args=(sender, warm_up + measured), daemon=True)
                sending.start()
                early = _receive(receiver, warm_up)
                start = time.perf_counter()
                got = _receive(receiver, warm_up + measured - early)
                seconds = time.perf_counter() - start
                sending.join()
        return got / seconds

    def environment(self, host: int) -> dict[str, str]:
        """What a process on this host finds in its environment, as from `torchrun`."""
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": CARD,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # or each host warns that the addresses have no names
            # so that `python` on a host is the one that runs this
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }

    def inside(self, host: int) -> AbstractContextManager[None]:
        """This thread, and what it starts, is on that host; a socket made there stays there."""
        return _inside(self.namespace(host))

    def end_all(self) -> None:
        """Kill whatever still runs on the hosts."""
        for host in range(self.count):
            _kill_inside(self.namespace(host))

    def popen(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on one host, in a process group of its own, with its output in pipes."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],
            env={**os.environ, **self.environment(host), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        echo: bool = True,
    ) -> str:
        """Run a command once on each host, wait for all, and return what host 0 wrote to its output.

        With `echo`, host 0's output and everybody's errors are shown as they come. When a host fails, or
        time is up, all are ended and `HostFailed` says who it was.
        """
        ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        running: dict[int, _Running] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for host in range(self.count):
                running[host] = _Running(host, self.popen(host, command, env), ended, echo)
            for _ in range(self.count):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                host, code = ended.get(timeout=left)
                if code:
                    raise running[host].failure(code)
        except Empty:
            late = [host for host, run in running.items() if run.process.poll() is None]
            names = ", ".join(f"host {host}" for host in late)
            raise HostFailed(f"not done after {timeout:g} s: {names}", 124) from None
        finally:
            _end([run.process for run in running.values()])
        return "".join(running[0].output)


class _Running:
    """A host's process, with threads that read what it writes and say when it ended."""

    def __init__(
        self, host: int, process: subprocess.Popen[str], ended: SimpleQueue[tuple[int, int]], echo: bool
    ) -> None:
        self.host, self.process, self.ended = host, process, ended
        self.output: deque[str] = deque(maxlen=None if host == 0 else 20)
        streams = [
            (process.stdout, self.output, sys.stdout if echo and host == 0 else None),
            (process.stderr, deque[str](maxlen=0), sys.stderr if echo else None),
        ]
        self._readers = [threading.Thread(target=self._read, args=of, daemon=True) for of in streams]
        for thread in [*self._readers, threading.Thread(target=self._wait, daemon=True)]:
            thread.start()

    def failure(self, code: int) -> HostFailed:
        how = f"failed with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        unseen = "".join(self.output) if self.host else ""
        words = f"; its last output:\n{unseen}" if unseen else ""
        return HostFailed(f"host {self.host} {how}{words}", code if code > 0 else 128 - code)

    def _read(self, stream: IO[str], kept: deque[str], shown: IO[str] | None) -> None:
        prefix = f"[host {self.host}] " if self.host else ""
        with stream:
            for line in stream:
                kept.append(line)
                if shown:
                    shown.write(prefix + line)
                    shown.flush()

    def _wait(self) -> None:
        code = self.process.wait()
        for reader in self._readers:
            reader.join(timeout=2.0)  # a child that outlives the process may keep the pipes open
        self.ended.put((self.host, code))


def check_machine() -> None:
    """Say what is missing, before anything is built."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LaunchError(f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2)")
    if os.geteuid() != 0:
        raise LaunchError("network namespaces can be made by root only: run this with sudo")


def remove_leftovers() -> None:
    """Remove the namespaces of tools that were killed, with the processes left in them."""
    for namespace in NAMESPACES.glob(f"{PREFIX}*-*"):
        pid = namespace.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove(namespace.name)


def _remove(namespace: str) -> None:
    _kill_inside(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _kill_inside(namespace: str) -> None:
    # Another tool may be removing the same leftovers, so what is gone already is no error.
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"`{command}` failed: {done.stderr.strip()}")


@contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """This thread is in the namespace; a socket made there stays there."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12

    def enter(descriptor: int) -> None:
        if libc.setns(descriptor, 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")

    with Path("/proc/thread-self/ns/net").open() as outside, (NAMESPACES / namespace).open() as inside:
        enter(inside.fileno())
        try:
            yield
        finally:
            enter(outside.fileno())


def _send(connection: socket.socket, nbytes: int) -> None:
    chunk = memoryview(bytes(1 << 16))
    while nbytes > 0:
        nbytes -= connection.send(chunk[:nbytes])


def _receive(connection: socket.socket, nbytes: int) -> int:
    """Receive at least so many bytes, and say how many they were."""
    room, got = memoryview(bytearray(1 << 16)), 0
    while got < nbytes:
        count = connection.recv_into(room)
        if not count:
            raise ConnectionError("the probe's sender is gone")
        got += count
    return got


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End what still runs, each with its process group: first asked to, then made to."""
    for number, patience in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
        still = [process for process in processes if process.poll() is None]
        for process in still:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + (patience or 0.0)
        for process in still:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience and max(0.0, deadline - time.monotonic()))


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, both ways (default: 1gbit)")
    parser.add_argument("--timeout", type=float, help="seconds that the command may take")
    parser.add_argument("--no-probe", action="store_true", help="do not measure the link first")
    parser.add_argument("command", nargs="*", help="run once on each host; after --; none: only probe")
    asked = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        with Hosts(asked.hosts, asked.rate) as hosts:
            if asked.hosts > 1 and not asked.no_probe:
                print(hosts.describe_link(), flush=True)
            if asked.command:
                hosts.run(asked.command, timeout=asked.timeout)
    except HostFailed as failure:
        print(failure, file=sys.stderr)
        return failure.code
    except OffbeatError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
