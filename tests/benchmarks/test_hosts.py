"""The cluster on one machine: real namespaces, shaped on both ends, and gone afterwards."""

from __future__ import annotations

import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.support.bytecode import BYTECODE, cached_bytecode

from offbeat.errors import LaunchError, SettingError
from tests.support.host_processes import needs_namespaces
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NAMESPACES = Path("/run/netns")

WAIT = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
MEET = """
import os, socket
rank, address = os.environ["RANK"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == "0":
    with socket.create_server(address) as server:
        peer, (peer_address, _) = server.accept()
        print(server.getsockname()[0], peer_address, peer.recv(1).decode(), flush=True)
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(rank.encode())
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.support.hosts")


@pytest.fixture
def started() -> Iterator[subprocess.Popen[str]]:
    """The tool as a process of its own, with two hosts whose command is running."""
    options = ["--hosts", "2", "--rate", "1gbit", "--no-probe"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.support.hosts", *options, "--", "python", "-c", WAIT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def namespaces_of(pid: int) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"offbeat-{pid}-*"))


def shaping(namespace: str) -> dict[str, dict[str, Any]]:
    """The token bucket of each interface that has one."""
    shown = subprocess.run(["tc", "-n", namespace, "-j", "qdisc", "show"], capture_output=True, check=True)
    found = json.loads(shown.stdout)
    return {qdisc["dev"]: qdisc["options"] for qdisc in found if qdisc["kind"] == "tbf" and qdisc["root"]}


def assert_ends(pidfd: int) -> None:
    assert select.select([pidfd], [], [], HANG_S)[0], "a process of the tool still runs"
    os.close(pidfd)


@needs_namespaces
def test_both_ends_of_each_cable_have_the_rate(tool: ModuleType) -> None:
    with tool.Hosts(count=2, rate="1gbit") as hosts:
        for rate, bytes_s in (("1gbit", 125e6), ("50mbit", 6.25e6)):
            hosts.set_rate(rate)
            ends = [shaping(hosts.namespace(host)).get("eth0") for host in range(2)]
            ends += [shaping(hosts.switch).get(f"port{host}") for host in range(2)]
            assert [end and end["rate"] for end in ends] == [bytes_s] * 4
            assert all(end and end["lat"] == 100_000 for end in ends)


@needs_namespaces
def test_hosts_have_addresses_of_their_own_and_reach_host_0(tool: ModuleType) -> None:
    before = subprocess.run(["ip", "-o", "address"], capture_output=True).stdout
    with tool.Hosts(count=2, rate="1gbit") as hosts:
        assert subprocess.run(["ip", "-o", "address"], capture_output=True).stdout == before
        for _ in range(2):  # the second run must not wait for the port of the first
            met = hosts.run(["python", "-c", MEET], timeout=HANG_S, echo=False).split()
            assert met == [hosts.address(0), hosts.address(1), "1"]
        assert hosts.address(0) != hosts.address(1)
    assert not namespaces_of(os.getpid())


@needs_namespaces
def test_commands_get_the_usual_environment(tool: ModuleType) -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    with tool.Hosts(count=1, rate="1gbit") as hosts:
        seen = json.loads(hosts.run(["python", "-c", show], env={"EXTRA": "yes"}, echo=False))
        expected = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "EXTRA": "yes",
        }
        expected |= {"MASTER_ADDR": hosts.address(0), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    assert {name: seen.get(name) for name in expected} == expected


@needs_namespaces
def test_a_probe_measures_both_ways(tool: ModuleType) -> None:
    with tool.Hosts(count=2, rate="1gbit") as hosts:
        inside = Path("/proc/thread-self/ns/net").readlink()
        there, back = hosts.probe()
        assert there > 0 and back > 0
        assert Path("/proc/thread-self/ns/net").readlink() == inside


@needs_namespaces
def test_a_host_that_fails_is_named_and_the_others_are_ended(
    tool: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    fail = "import os, sys\nif os.environ['RANK'] == '1': print('words'), sys.exit('why')\n" + WAIT
    with tool.Hosts(count=2, rate="1gbit") as hosts:
        with pytest.raises(
            tool.HostFailed, match=r"host 1 failed with exit code 1; its last output:\nwords"
        ) as failed:
            hosts.run(["python", "-c", fail])
        assert failed.value.code == 1
        assert "[host 1] why" in capfd.readouterr().err
        with pytest.raises(tool.HostFailed, match=r"its last output:\nwords\nwhy") as failed:
            hosts.run(["python", "-c", fail], echo=False)
        assert "why" not in capfd.readouterr().err
        inside = subprocess.run(["ip", "netns", "pids", hosts.namespace(0)], capture_output=True)
        assert not inside.stdout


@needs_namespaces
def test_a_killed_host_and_a_late_one_are_named(tool: ModuleType) -> None:
    with tool.Hosts(count=2, rate="1gbit") as hosts:
        with pytest.raises(tool.HostFailed, match="was killed by SIGKILL") as failed:
            hosts.run(["python", "-c", "import os; os.kill(os.getpid(), 9)"])
        assert failed.value.code == 137
        with pytest.raises(tool.HostFailed, match=r"not done after 0\.1 s: host 0, host 1") as failed:
            hosts.run(["python", "-c", WAIT], timeout=0.1, echo=False)
        assert failed.value.code == 124


@needs_namespaces
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_tool_takes_everything_with_it(
    started: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    assert started.stdout
    child = os.pidfd_open(int(started.stdout.readline()))
    assert len(namespaces_of(started.pid)) == 3
    started.send_signal(number)
    assert started.wait() == code
    assert_ends(child)
    assert not namespaces_of(started.pid)


@needs_namespaces
def test_leftovers_of_a_killed_tool_go_at_the_next_start(
    tool: ModuleType, started: subprocess.Popen[str]
) -> None:
    assert started.stdout
    child = os.pidfd_open(int(started.stdout.readline()))
    with tool.Hosts(count=1, rate="1gbit"):
        assert len(namespaces_of(started.pid)) == 3, "a tool that lives was robbed"
    started.kill()
    started.wait()
    assert len(namespaces_of(started.pid)) == 3
    with tool.Hosts(count=1, rate="1gbit") as hosts:
        assert not namespaces_of(started.pid)
        assert_ends(child)
        assert len(namespaces_of(os.getpid())) == 2
        hosts.run(["true"])


@needs_namespaces
def test_namespaces_of_others_are_left_alone(tool: ModuleType, started: subprocess.Popen[str]) -> None:
    started.kill()
    started.wait()
    foreign = f"foreign-{started.pid}-0"  # named alike by somebody else, with a dead pid
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with tool.Hosts(count=1, rate="1gbit"):
            pass
        assert (NAMESPACES / foreign).exists()
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


def test_a_link_is_described_by_its_probe(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.Hosts, "probe", lambda _: (119.6e6, 119.5e6))
    words = tool.Hosts(count=2, rate="1gbit").describe_link()
    assert "119.60 MB/s there, 119.50 MB/s back" in words and "nominal 125.00 MB/s (1gbit)" in words


def test_what_is_missing_is_said(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", {"ip": "/sbin/ip"}.get)
    with pytest.raises(LaunchError, match="tc not found: install iproute2"):
        tool.check_machine()
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="root only"):
        tool.check_machine()
    with pytest.raises(SettingError, match="kbit, mbit"):
        tool.Hosts(count=2, rate="fast")
    with pytest.raises(SettingError, match="from 1 to 250"):
        tool.Hosts(count=0)


@pytest.mark.parametrize(
    ("rate", "nbytes"), [(50e6, 8_192), (200e6, 25_000), (1e9, 125_000), (1e10, 524_288)]
)
def test_the_bucket_holds_1_ms_within_bounds(tool: ModuleType, rate: float, nbytes: int) -> None:
    assert tool.burst_bytes(rate) == nbytes
    assert 1500 < tool.segment_bytes(rate) < nbytes, "else the shaper cuts each into packets"
    assert tool.segment_bytes(rate) <= 65_536


def test_bytecode_is_kept_where_python_does_not(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert cached_bytecode() == {}
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **cached_bytecode()}
    told = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    out = subprocess.run([sys.executable, "-c", told], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", str(BYTECODE)]
    assert tool.Hosts(2).environment(1)["PYTHONDONTWRITEBYTECODE"] == ""
