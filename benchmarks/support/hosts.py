"""Emulated cluster on one machine: hosts with network interfaces of a given rate, on one switch.

    python -m benchmarks.support.hosts --hosts 4 --rate 1gbit -- python script.py

Each host is a network namespace; the switch is a bridge in a namespace of its own, so the machine's own
network is not touched. A token bucket on both ends of each cable limits what a host sends and receives.
The name of a namespace contains the pid of the process that made it; the next start removes the namespaces
of processes that are gone.
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

from benchmarks.support.bytecode import cached_bytecode
from benchmarks.support.shaper import burst_bytes, segment_bytes
from offbeat.core.units import parse_rate
from offbeat.errors import LaunchError, OffbeatError, SettingError

INTERFACE = "eth0"
NAMESPACES = Path("/run/netns")
PREFIX = "offbeat-"
QUEUE_S = 0.1  # seconds of traffic that a full link queues before it drops packets
TERMINATE_S = 5.0  # how long a process may take to exit after SIGTERM

_serial = itertools.count()


class HostFailed(OffbeatError):
    """A host's command failed or timed out; `code` is the exit code that a shell would report."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Hosts:
    """`count` emulated hosts inside a `with` block; each sends and receives at most `rate`."""

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
        """Kill the hosts' processes and remove their namespaces."""
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
        """Change the rate of all links, in both directions; open connections stay open."""
        bits = parse_rate(rate)
        shape = f"root tbf rate {bits:.0f}bit burst {burst_bytes(bits)} latency {QUEUE_S * 1e3:.0f}ms"
        for host in range(self.count):
            for namespace, device in ((self.namespace(host), INTERFACE), (self.switch, f"port{host}")):
                _call(f"ip -n {namespace} link set dev {device} gso_max_size {segment_bytes(bits)}")
                _call(f"tc -n {namespace} qdisc replace dev {device} {shape}")
        self.rate = rate

    def _build(self) -> None:
        _call(f"ip netns add {self.switch}")
        _call(f"ip -n {self.switch} link add switch type bridge")
        _call(f"ip -n {self.switch} link set switch up")
        for host in range(self.count):
            own, port = self.namespace(host), f"port{host}"
            _call(f"ip netns add {own}")
            _call(f"ip -n {self.switch} link add {port} type veth peer name {INTERFACE} netns {own}")
            _call(f"ip -n {self.switch} link set {port} master switch up")
            _call(f"ip -n {own} address add {self.address(host)}/24 dev {INTERFACE}")
            _call(f"ip -n {own} link set {INTERFACE} up")
            _call(f"ip -n {own} link set lo up")
            with _in_namespace(own):  # BBR, the default of some machines, varied by 15% at 50 Mbit/s
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")

    def probe(self) -> tuple[float, float]:
        """Measure the bytes per second of one plain connection from host 0 to host 1, and back."""
        if self.count < 2:
            raise SettingError("a probe needs two hosts")
        return self._transfer(0, 1), self._transfer(1, 0)

    def describe_link(self) -> str:
        """Probe the link and describe it in words, to print above a table."""
        there, back = self.probe()
        return (
            f"link: {there / 1e6:.2f} MB/s there, {back / 1e6:.2f} MB/s back by one connection; nominal"
            f" {parse_rate(self.rate) / 8e6:.2f} MB/s ({self.rate}), of which headers take 4.4%"
        )

    def _transfer(self, source: int, target: int) -> float:
        bytes_s = parse_rate(self.rate) / 8
        # The bucket and the socket buffers absorb the first bytes; bounded, for links faster than the CPU.
        warm_up = min(int(0.4 * bytes_s) + 2 * burst_bytes(8 * bytes_s), 100_000_000)
        measured = min(int(bytes_s) + 500_000, 400_000_000)
        with _in_namespace(self.namespace(target)):
            listener = socket.create_server((self.address(target), 0))
        with _in_namespace(self.namespace(source)):
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
        """Return the environment variables of a process on this host, as `torchrun` sets them."""
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise each host warns that addresses have no names
            **cached_bytecode(),
            # `python` on a host is the interpreter that runs this
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }

    def enter(self, host: int) -> AbstractContextManager[None]:
        """Move this thread, and what it starts, to a host; a socket made inside stays there."""
        return _in_namespace(self.namespace(host))

    def kill_all(self) -> None:
        """Kill all processes that still run on the hosts."""
        for host in range(self.count):
            _kill_inside(self.namespace(host))

    def popen(
        self, host: int, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on one host, in its own process group, with its output in pipes."""
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
        """Run a command once on each host, wait for all, and return the standard output of host 0.

        With `echo`, the output of host 0 and the errors of all hosts are shown as they come. When a host
        fails or the timeout passes, all processes are terminated and `HostFailed` names the host.
        """
        ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        running: dict[int, _HostProcess] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for host in range(self.count):
                running[host] = _HostProcess(host, self.popen(host, command, env), ended, echo)
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
            _terminate_all([run.process for run in running.values()])
        return "".join(running[0].output)


class _HostProcess:
    """Process on a host, with threads that read its output and report its exit."""

    def __init__(
        self, host: int, process: subprocess.Popen[str], ended: SimpleQueue[tuple[int, int]], echo: bool
    ) -> None:
        self.host, self.process, self.ended = host, process, ended
        self.output: deque[str] = deque(maxlen=None if host == 0 else 20)
        self._errors: deque[str] = deque(maxlen=0 if echo else 20)
        streams = [
            (process.stdout, self.output, sys.stdout if echo and host == 0 else None),
            (process.stderr, self._errors, sys.stderr if echo else None),
        ]
        self._readers = [threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams]
        for thread in [*self._readers, threading.Thread(target=self._wait, daemon=True)]:
            thread.start()

    def failure(self, code: int) -> HostFailed:
        how = f"failed with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        unseen = "".join([*(self.output if self.host else ()), *self._errors])
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
    """Raise an error that names the missing tools or rights, before anything is built."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LaunchError(f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2)")
    if os.geteuid() != 0:
        raise LaunchError("network namespaces can be made by root only: run this with sudo")


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed, with the processes left in them."""
    for namespace in NAMESPACES.glob(f"{PREFIX}*-*"):
        pid = namespace.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            _remove(namespace.name)


def _remove(namespace: str) -> None:
    _kill_inside(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _kill_inside(namespace: str) -> None:
    # Another run may be removing the same leftovers, so a namespace that is gone is no error.
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"`{command}` failed: {done.stderr.strip()}")


@contextmanager
def _in_namespace(namespace: str) -> Iterator[None]:
    """Move this thread to a network namespace; a socket made inside stays there."""
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
    """Receive at least `nbytes` bytes; return how many arrived."""
    buffer, got = memoryview(bytearray(1 << 16)), 0
    while got < nbytes:
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the probe's sender closed the connection")
        got += count
    return got


def _terminate_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Terminate running processes with their process groups: first by SIGTERM, then by SIGKILL."""
    for number, patience in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, None)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + (patience or 0.0)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience and max(0.0, deadline - time.monotonic()))


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.support.hosts", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (default: 4)")
    parser.add_argument("--rate", default="1gbit", help="rate of each host's link (default: 1gbit)")
    parser.add_argument("--timeout", type=float, help="seconds after which the command is terminated")
    parser.add_argument("--no-probe", action="store_true", help="do not measure the link first")
    parser.add_argument("command", nargs="*", help="run once on each host, after --; none: only probe")
    asked = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
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
