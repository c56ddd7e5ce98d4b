"""Python processes that start in no time: forked from one that has imported torch and Offbeat.

The tests start some hundred processes, and each would import torch for seconds. The process that forks (the
zygote) forks twice, and the one in between ends; the kernel then gives the last one to the process of the
test, which has asked for that. So it is a child of the test as any other: it is waited for, stopped, killed.

The server from which multiprocessing forks a launcher's workers imports as much, and is forked here, too.

Some tests of every command start a real `python -m offbeat` all the same.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).parents[2]
LONGEST_REQUEST = 1 << 17
MOST_FILES = 8  # that a request brings: the standard streams, and what else the process keeps
LAUNCHING = {"train", "compare", "calibrate"}  # the commands that start workers

_zygotes: list[socket.socket] = []  # the connection to this process's own, once it has one


class Python(subprocess.Popen[Any]):
    """`python -m MODULE …`, `python -c CODE …` or `python SCRIPT …`.

    It takes the options of Popen that `_execute_child` reads.
    """

    def __init__(self, *arguments: str, start_new_session: bool = False, **options: Any) -> None:
        self._start_new_session = start_new_session
        super().__init__([sys.executable, *arguments], **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        _pass_fds, cwd, env, _info, _flags, _shell, *pipes = rest[:12]
        stdin, _, _, stdout, _, stderr = pipes
        given = [fd if fd >= 0 else standard for standard, fd in enumerate((stdin, stdout, stderr))]
        self.pid = _fork(
            args[1:],
            given,
            environment=dict(os.environ if env is None else env),
            folder=str(cwd or Path.cwd()),
            session=self._start_new_session,
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def fork_forkservers() -> None:
    """Let multiprocessing's forkserver of this process be forked, which else imports for seconds."""
    spawn = util.spawnv_passfds  # type: ignore[attr-defined]

    def start(path: Any, args: Sequence[str], passfds: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:  # the tracker of resources, which imports little
            return int(spawn(path, args, passfds))
        about = {"environment": dict(os.environ), "folder": str(Path.cwd()), "session": False}
        return _fork(["-c", args[-1]], [0, 1, 2, *passfds], kept=[*passfds], **about)

    util.spawnv_passfds = start  # type: ignore[attr-defined]


def _fork(arguments: Sequence[str], fds: list[int], **about: Any) -> int:
    """Return the process number of a new child; its standard streams come first in `fds`."""
    request = json.dumps({"arguments": arguments, "kept": [], **about}).encode()
    zygote, prctl = _zygote(), ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        socket.send_fds(zygote, [request], fds)
        return int(zygote.recv(64))
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _zygote() -> socket.socket:
    if not _zygotes:
        _zygotes.append(_start_zygote())
    return _zygotes[0]


def _start_zygote() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}]"
    run = f"from tests.support.python import run_and_end; run_and_end({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", f"{path}; {run}"], pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # which ends it, and comes first
    return ours


def fork_zygote(*unwanted: int) -> None:
    """Fork a zygote from this process, which has a single thread; it keeps no `unwanted` files."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for fd in unwanted:
            os.close(fd)
        code: Any = 1
        try:
            run_zygote(theirs.detach())
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    theirs.close()
    _zygotes.append(ours)


# --- in the zygote


def run_and_end(fd: int) -> None:
    """Run a zygote; what it forks ends at once, where nothing but its own thread is left of it.

    To take apart all that was imported, object by object, copies the memory that the zygote shares: 0.35 s.
    Where other threads run, as those of process groups do, the interpreter ends as ever: they may disturb it.
    """
    code: Any = 0
    try:
        run_zygote(fd)
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            raise
    if sum(1 for _ in Path("/proc/self/task").iterdir()) == 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_zygote(fd: int) -> None:
    """Fork a process for each request, until the test's process ends."""

    import torch._dynamo  # noqa: F401 - as the first optimizer does

    import offbeat.attach
    import offbeat.cli
    import offbeat.cli.outputs
    import offbeat.experiments.process_run
    import offbeat.worlds.processes.server.shard  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    asked = socket.socket(fileno=fd)
    while True:
        request, fds, _, _ = socket.recv_fds(asked, LONGEST_REQUEST, MOST_FILES)
        if not request:
            return
        reader, writer = os.pipe()
        middle = os.fork()
        if not middle:
            parent = os.getpid()
            last = os.fork()
            if last:
                os.write(writer, str(last).encode())
                os._exit(0)
            for one in (asked.detach(), reader, writer):
                os.close(one)
            while os.getppid() == parent:  # it looks for its parent, which the test's process is soon
                time.sleep(0.0001)
            break
        os.waitpid(middle, 0)  # from now on, the last one is a child of the test's process
        asked.send(os.read(reader, 64))
        for one in (reader, writer, *fds):
            os.close(one)
    _become(json.loads(request), fds)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Do what `python ARGUMENTS` does."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    _number_files(fds, [0, 1, 2, *request["kept"]])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    how, *arguments = request["arguments"]
    if arguments[:1] == ["offbeat"] and LAUNCHING & set(arguments[1:2]):
        fork_zygote()
        fork_forkservers()
    if how not in ("-m", "-c"):
        sys.argv = [how, *arguments]
        sys.path[:0] = [str(Path(how).parent)]
        runpy.run_path(how, run_name="__main__")
        return
    what, *arguments = arguments
    sys.argv = [how, *arguments]
    if how == "-m":
        sys.argv[0] = what
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"]
        main.__dict__.update(__name__="__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _number_files(fds: list[int], numbers: list[int]) -> None:
    """Give open files these numbers, whichever they have."""
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds]
    for fd in set(fds) - {0, 1, 2}:
        os.close(fd)
    for fd, number in zip(apart, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
