"""Command-line options that several benchmarks have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def benchmark_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Create the option parser of a benchmark; its usage line shows the command that a user types."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks run {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """Add `--data FOLDER`, which defaults to the environment variable OFFBEAT_DATA."""
    folder = os.environ.get("OFFBEAT_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        default=Path(folder) if folder else None,
        help="folder of the data sets (default: $OFFBEAT_DATA)",
    )


def require_data(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Path:
    """Return the folder of the data sets; without one, exit with an error that says what to type."""
    if options.data is None:
        parser.error("the data sets are needed: give --data FOLDER, or set OFFBEAT_DATA")
    folder: Path = options.data
    return folder
