"""Python processes on emulated hosts: network namespaces, whose links a test can cut for real."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from benchmarks.support.hosts import NAMESPACES, Hosts

from tests.support.limits import HANG_S
from tests.support.python import Python

ENTER = """
import ctypes, os, runpy, sys
assert ctypes.CDLL(None).setns(os.open({path!r}, os.O_RDONLY), 0x40000000) == 0
"""
RUN = "\nsys.argv = {arguments!r}\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc") and shutil.which("unshare")):
        return False
    return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="needs root, and iproute2's ip and tc"
)


class HostProcess:
    """A Python process on a host: `python -m MODULE …`, or with "-c" as the module, `python -c CODE`."""

    def __init__(self, hosts: Hosts, host: int, module: str, *arguments: str, **environment: str) -> None:
        code = ENTER.format(path=str(NAMESPACES / hosts.namespace(host)))
        code += arguments[0] if module == "-c" else RUN.format(module=module, arguments=[module, *arguments])
        self.process = Python(
            *("-c", code),
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, wanted: str) -> None:
        """Read on until a line contains this."""
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if wanted in line:
                return
        raise AssertionError(f"never said {wanted}: {said}")

    def end(self) -> tuple[int, str]:
        """Close what it reads, and wait; return its exit code and the rest of what it said."""
        said, _ = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, said


def cut(hosts: Hosts, host: int) -> None:
    """Take a host's link down."""
    subprocess.run(["ip", "-n", hosts.switch, "link", "set", f"port{host}", "down"], check=True)
