"""A command that a user stops with Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys


def interrupt(args: list[str], after: str) -> None:
    """Run `offbeat` with these arguments and interrupt it after the first line that says so."""
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if after in line:
                break
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate()
    assert running.returncode not in (0, None)
    assert "Traceback" not in errors
