"""Which strategies live on the internet, what do they reach there, and what would it cost?

    python -m benchmarks run internet
    python -m benchmarks run internet --workers 10000 --only asp,oscars,bsp
    python -m benchmarks run internet --table

Two hours of virtual time on the preset `internet`: 1,000 consumer GPUs in 12 regions that live 40 minutes on
average. `quadratic`, and `digits` with its small MLP and one image a step. Strategies with a server come and
go at it. Those without one run twice: elastic workers go on without the dead, others wait for them. Money
counts the machines that are there, and the server's, each for `--price`, until the target (0.1 of the
quadratic's loss, 0.9 of digits' accuracy), or else until the end. Each run is a process of its own, `--jobs`
at a time; its seconds are CPU seconds. `--out` keeps the runs, and a report page of each task: a command that
was stopped goes on with the runs that are missing. Finished runs are kept among the raw results, too, in a
file for each number of workers, from which docs/internet.md is written. `--table` does so without a run, for
instance with files that were brought from another machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.support.kept import kept
from benchmarks.support.options import benchmark_parser
from benchmarks.support.tables import Table, machine
from benchmarks.virtual_time.internet_page import write_section
from benchmarks.virtual_time.internet_raw import Kept, all_kept, keep
from benchmarks.virtual_time.internet_runs import (
    LEFT_OUT,
    STEPS,
    UNTIL_S,
    USUAL,
    WAITS,
    Case,
    cases,
    prepare,
    run,
)
from offbeat.core.units import seconds_of, size
from offbeat.experiments.planner.cost import Price
from offbeat.experiments.report.page import write_page

COLUMNS = [
    *("task", "strategy", "how", "what becomes of it", "batches that count", "value"),
    *("to the target", "bytes a worker", "cost", "CPU s"),
]


def run_all(planned: Sequence[Case], out: Path, jobs: int) -> tuple[dict[Case, dict[str, Any]], int]:
    """Run all cases that are not kept, `jobs` at a time; return what became of each, and how many were kept.

    Those that wait for the dead are short, and come last: so all processors are in use to the end.
    """
    found: dict[Case, dict[str, Any]] = {}
    were_kept = 0
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(
                kept, out / f"{case.folder}.json", [*case, STEPS], lambda case=case: run(case, out)
            ): case
            for case in sorted(planned, key=lambda case: case.how == WAITS)
        }
        try:
            for done in as_completed(running):
                case = running[done]
                found[case], was_kept = done.result()
                were_kept += was_kept
                how = "kept" if was_kept else f"{found[case]['cpu_s']:.0f} CPU s"
                print(f"{len(found)} of {len(planned)}: {case.folder}, {how}", flush=True)
        except BaseException:  # do not begin those that wait: this command can go on later
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found, were_kept


def shown(found: dict[str, Any], price: Price) -> list[str]:
    """Format what became of a run: its fate, what it reached, and what it cost."""
    if found["problem"]:
        fate = re.split(r"[:;(]", found["problem"])[0].strip()  # what comes after it tells what to do
        if "ended_s" in found:
            fate = f"ends after {found['ended_s']:.0f} s: {fate}"
    elif found.get("value") is None:
        fate = "stands nearly still: not evaluated even once"
    else:
        fate = "lives"
    if "value" not in found:
        return [fate, "–", "–", "–", "–", "–", f"{found['cpu_s']:.0f}"]
    value, reached = found["value"], found["reached_s"]
    return [
        fate,
        f"{found['batches']:,}",
        "–" if value is None else f"{value:.3g}",
        "–" if reached is None else f"{reached / 60:.0f} min",
        size(found["bytes"]),
        price.write(price.of(found["machine_s"])),
        f"{found['cpu_s']:.0f}",
    ]


def is_whole(kept_runs: Kept) -> bool:
    """Return whether all runs of so many workers are kept; of more than the usual, any are enough."""
    return kept_runs.workers > USUAL or set(cases(USUAL)) <= set(kept_runs.found)


def make_table(kept_runs: Kept, price_text: str, variant: str = "") -> tuple[Table, Path]:
    """Write the result of the runs."""
    price = Price.parse(price_text)
    table = Table("internet", __doc__ or "", COLUMNS, variant)
    table.machine = kept_runs.machine
    for case, found in kept_runs.found.items():
        table.row(case.task, case.strategy, case.how, *shown(found, price))
    for strategy, why in LEFT_OUT.items():
        table.note(f"`{strategy}` is left out: {why}.")
    cpu_s = sum(each["cpu_s"] for each in kept_runs.found.values())
    table.note(
        f"{kept_runs.workers:,} workers, {price_text}; these runs took {cpu_s / 60:.1f} minutes of CPU time."
    )
    return table, table.write()


def write_docs(price_text: str) -> None:
    """Write the results and the sections of docs/internet.md of all raw results that are whole."""
    for kept_runs in filter(is_whole, all_kept()):
        workers = kept_runs.workers
        table, result = make_table(kept_runs, price_text, "" if workers == USUAL else f"{workers}-workers")
        names = dict.fromkeys(case.strategy.partition("(")[0] for case in kept_runs.found)
        options = "" if workers == USUAL else f" --workers {workers} --only {','.join(names)}"
        page = write_section(workers, COLUMNS, table.rows, table.notes, result, options)
        print(f"written: {page}")


def main(arguments: Sequence[str]) -> None:
    parser = benchmark_parser("internet", __doc__)
    parser.add_argument("--workers", type=int, default=USUAL, metavar="N")
    parser.add_argument("--only", metavar="STRATEGY,…", help="run only these strategies")
    parser.add_argument("--until", default=f"{UNTIL_S:g}s", metavar="TIME", help="virtual time (default: 2h)")
    parser.add_argument("--price", default="$0.25/h", help="of a machine for an hour (default: $0.25/h)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/internet"), metavar="FOLDER")
    parser.add_argument("--table", action="store_true", help="write the page from raw results; run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        write_docs(options.price)
        return
    until_s, began = seconds_of(options.until), time.monotonic()
    planned = list(cases(options.workers, options.only, until_s))
    prepare()
    found, were_kept = run_all(planned, options.out, options.jobs)
    print(
        f"{len(planned)} runs, {were_kept} of them kept from an earlier command: "
        f"{(time.monotonic() - began) / 60:.1f} minutes of real time, {options.jobs} at a time"
    )
    for name in dict.fromkeys(case.task for case in planned):
        lived = [case for case in planned if case.task == name and not found[case]["problem"]]
        if lived:
            write_page(options.out / f"{name}.html", [options.out / case.folder for case in lived])
            print(f"written: {options.out / name}.html")
    own = Kept(options.workers, machine(), {case: found[case] for case in planned})
    if until_s == UNTIL_S and options.workers >= USUAL:  # fewer are a trial
        keep(own)
        if is_whole(own):
            write_docs(options.price)
            return
    parts = ["" if options.workers == USUAL else f"{options.workers}-workers", options.only or ""]
    parts.append("" if until_s == UNTIL_S else f"{until_s:g}-s")
    variant = "-".join(filter(None, parts))
    make_table(own, options.price, re.sub(r"[^a-z0-9-]+", "-", variant).strip("-"))
