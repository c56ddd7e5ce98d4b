"""Slurm on this machine: munged, slurmctld and slurmd of Debian, with all state in a temporary folder."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.limits import HANG_S
from tests.support.ports import LOWEST, free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

CONFIG = """\
ClusterName=offbeat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
Epilog={folder}/epilog
FirstJobId={first_job}
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=main Nodes=localhost Default=YES MaxTime=20
"""


def missing_slurm() -> str:
    """Return why Slurm cannot be started here; empty if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons run as root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Slurm:
    """A cluster of one node that declares four CPUs, however many it has, and uses no cgroups."""

    def __init__(self) -> None:
        # The path of a socket is short, and pytest's folders are not.
        self._folder = tempfile.TemporaryDirectory(prefix="offbeat-slurm-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": PATH,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def submit(self, *command: str) -> str:
        """Submit a batch script, wait until the job has ended, and return its state and output."""
        log = self.folder / "job.log"
        job = self.call("sbatch", "--parsable", f"--output={log}", *command).strip()
        until((self.folder / f"ended-{job}").exists)  # costs nothing while the job runs
        until(lambda: self.state(job) in ENDED)
        return f"{self.state(job)}\n{log.read_text() if log.exists() else ''}"

    def state(self, job: str) -> str:
        shown = self.call("scontrol", "show", "job", "--oneliner", job)
        return next(word for word in shown.split() if word.startswith("JobState=")).partition("=")[2]

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.folder.glob("*.out"))

    def _start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().partition(".")[0]
        first_job = 10_000 + free_port() - LOWEST  # the batch script makes a free port of it
        settings = {"host": host, "controller": free_port(), "node": free_port(), "first_job": first_job}
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **settings))
        (folder / "cgroup.conf").write_text(self._cgroups())
        epilog = folder / "epilog"  # runs when a job has ended
        epilog.write_text(f'#!/bin/sh\n: >"{folder}/ended-$SLURM_JOB_ID"\n')
        epilog.chmod(0o755)
        places = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
        places |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={v}" for k, v in places.items()))
        until(lambda: self._alive() and (folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D", "-N", "localhost")
        until(lambda: self._alive() and self._idle())

    def _cgroups(self) -> str:
        """Return the settings that keep Slurm from using cgroups, which containers may not change."""
        version = self.call("slurmd", "-V").split()[1]  # "slurm-wlm 22.05.8"
        if int(version.partition(".")[0]) >= 23:
            return "CgroupPlugin=disabled\n"
        return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/none\n"

    def _idle(self) -> bool:
        command = ["sinfo", "--noheader", "--format=%T"]
        done: Any = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=HANG_S
        )
        return bool(done.stdout.strip() == "idle")

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("wb") as out:
            options: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            self._daemons.append(subprocess.Popen(command, env=self.environment, **options))

    def _alive(self) -> bool:
        assert all(daemon.poll() is None for daemon in self._daemons), self.logs()
        return True

    def _stop(self) -> None:
        """End the daemons, then what they have left: a step outlives its slurmd."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        until(lambda: not self._kill_rest())
        self._folder.cleanup()

    def _kill_rest(self) -> list[int]:
        """Kill the processes that have this cluster's configuration in their environment."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (process / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if ours:
                found.append(int(process.name))
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return found
