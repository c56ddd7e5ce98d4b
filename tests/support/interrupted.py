"""A command that is stopped from outside, by Ctrl-C or otherwise."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

from tests.support.python import Python


def interrupt(args: list[str], after: str, by: signal.Signals = signal.SIGINT) -> str:
    """Run `offbeat` with these arguments and stop it after the first line that says so.

    Ends when nobody holds its output any more, neither it nor any process that it has started; what was said
    after that line.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Python("-m", "offbeat", *args, **pipes) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if after in line:
                break
        running.send_signal(by)
        said, errors = running.communicate()
    assert running.returncode not in (0, None)
    assert "Traceback" not in errors
    return said
