"""List the benchmarks, or run one of them.

python -m benchmarks list
python -m benchmarks run NAME [options of that benchmark]
"""

from __future__ import annotations

import argparse
import importlib
import sys
from itertools import groupby
from pathlib import Path

from benchmarks.catalog import BENCHMARKS, UnknownBenchmark, find_benchmark

COLUMNS = ("name", "question", "takes about", "needs", "newest result")


def list_benchmarks() -> str:
    """Format the catalog as a table, with one section per folder."""
    root = Path(__file__).parents[1]
    sections = {
        folder: [
            (
                benchmark.name,
                benchmark.question,
                benchmark.takes,
                ", ".join(benchmark.needs) or "–",
                str(result.relative_to(root)) if (result := benchmark.newest_result) else "none",
            )
            for benchmark in group
        ]
        for folder, group in groupby(BENCHMARKS.values(), key=lambda benchmark: benchmark.folder)
    }
    rows = [COLUMNS, *(row for section in sections.values() for row in section)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    lines = [line(COLUMNS), line(tuple("-" * width for width in widths))]
    for folder, section in sections.items():
        lines += [f"[{folder}]", *map(line, section)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show every benchmark and its newest result")
    run = commands.add_parser("run", help="run one benchmark; `run NAME --help` shows its options")
    run.add_argument("name")
    run.add_argument("options", nargs=argparse.REMAINDER, help="options of that benchmark")
    asked = parser.parse_args()
    if asked.command == "list":
        print(list_benchmarks())
        return 0
    try:
        benchmark = find_benchmark(asked.name)
    except UnknownBenchmark as error:
        run.error(str(error))
    return importlib.import_module(benchmark.module).main(asked.options) or 0


if __name__ == "__main__":
    sys.exit(main())
