"""Virtual environment for the comparison: torch as pinned here, the peers' libraries, and this package.

    python -m benchmarks.peers.environment FOLDER

The peers are not dependencies of this package. torch is installed first, at the version in constraints.txt,
because the peers accept wide ranges of versions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ("torchft==0.2.0", "accelerate==1.15.0")


def commands(folder: Path) -> list[list[str]]:
    """Return the commands that create the environment."""
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [*install, "torch"],
        [*install, *PEERS],
        [*install, "-e", str(ROOT)],
        [python, "-m", "pip", "check"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.environment",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    for command in commands(folder):
        print(" ".join(command), flush=True)
        done = subprocess.run(command, check=False)
        if done.returncode:
            return done.returncode
    print(f"ready: {folder / 'bin' / 'python'} -m benchmarks run peers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
