"""Running the runs, several processes at once, each kept as a line of JSON once it is done."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.papers.claims import Outcome, Run
from offbeat.core.ledger import Ledger
from offbeat.core.settings import build, lookup, parse_pairs
from offbeat.core.strategy import Strategy
from offbeat.experiments.loop import Callback, Job, Worker
from offbeat.experiments.summary import summarize
from offbeat.experiments.tasks import Data, Task, task
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster, Slowdown, load_cluster
from offbeat.worlds.virtual.step_times import Lognormal

LATE = 1 / 3  # the last part of a run, in which it goes as it will go on


class Cache:
    """Outcomes by run, in files of JSON lines: one is written, all that lie beside it are read."""

    def __init__(self, folder: Path, name: str = "runs") -> None:
        self.folder = folder
        self._path = folder / f"{name}.jsonl"
        self._outcomes: dict[str, Outcome] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    kept = json.loads(line)
                except json.JSONDecodeError:  # of a run that was ended while it wrote
                    continue
                self._outcomes[json.dumps(kept["run"], sort_keys=True)] = kept["outcome"]

    def __contains__(self, run: Run) -> bool:
        return _plain(run) in self._outcomes

    def __getitem__(self, run: Run) -> Outcome:
        return self._outcomes[_plain(run)]

    def keep(self, run: Run, outcome: Outcome) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                ("\n" if cut_off else "") + json.dumps({"run": asdict(run), "outcome": outcome}) + "\n"
            )
        self._outcomes[_plain(run)] = outcome


def _plain(run: Run) -> str:
    """As it reads after JSON, which knows no tuples."""
    return json.dumps(json.loads(run.key), sort_keys=True)


class Pace(Callback):
    """When worker 0 had done each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self.seconds.append(worker.seconds)

    @property
    def late_step_s(self) -> float:
        count = max(1, int(len(self.seconds) * LATE))
        return (self.seconds[-1] - self.seconds[-1 - count]) / count


def perform(run: Run, data: Path | None, device: str = "cpu") -> Outcome:
    """What a run came to."""
    began = time.perf_counter()
    what = task(
        run.task, model=run.model, batch_size=run.batch_size, **({} if run.lr is None else {"lr": run.lr})
    )
    job = Job(
        task=what if run.looks else unlooked(what),
        strategy=strategy_of(run),
        workers=run.workers,
        seed=run.seed,
        steps=run.steps,
        evaluate_every=-(-run.steps // run.looks) if run.looks else run.steps,
        order=run.order,
    )
    pace = Pace()
    books: list[Ledger] = []

    def watchers(ledgers: list[Ledger]) -> Sequence[Callback]:
        books.extend(ledgers)
        return [pace]

    samples = loaded(what, data, device)
    history = simulate(job, cluster_of(run), samples, watchers, device)
    entries = [ledger.totals() for ledger in books]
    rate = sum(entry.steps / entry.seconds for entry in entries)  # of each until it has done its own steps
    return summarize(
        job,
        "virtual",
        history,
        entries,
        complete=True,
        late_step_s=pace.late_step_s,
        rate=rate,
        took_s=time.perf_counter() - began,
        machine=f"{torch.cuda.get_device_name() if device != 'cpu' else 'CPU'}, torch {torch.__version__}",
    )


def strategy_of(run: Run) -> Strategy[Any]:
    return build(lookup("strategy", run.strategy, STRATEGIES), parse_pairs(run.settings))


def cluster_of(run: Run) -> Cluster:
    """The preset with so many workers; where the run says how long a step takes, all take longer alike."""
    cluster = load_cluster(run.cluster).for_workers(run.workers)
    if run.step_s is None:
        return cluster
    usual = cluster.workers[0].step_s
    usual_s = usual.median_s if isinstance(usual, Lognormal) else usual
    assert isinstance(usual_s, float), f"{run.cluster}: its first group has no usual time of a step"
    slow = Slowdown(workers=tuple(range(run.workers)), factor=run.step_s / usual_s)
    return replace(cluster, slow=(*cluster.slow, slow))


def unlooked(what: Task) -> Task:
    """The same task, which is never evaluated: where only time is wanted, that is most of the work."""

    class Unlooked(type(what)):  # type: ignore[misc]
        def evaluate(self, model: nn.Module, data: Data) -> float:
            return float("nan")

        def also(self, model: nn.Module, data: Data) -> dict[str, float]:
            return {}

    return Unlooked(**vars(what))


@lru_cache(maxsize=4)
def _loaded(name: str, data: Path | None, device: str) -> Data:
    return task(name).load(data).to(device)


def loaded(what: Task, data: Path | None, device: str) -> Data:
    """A process keeps the data of its runs: unpacking takes longer than some of them."""
    return _loaded(what.name, data, device)


def perform_all(
    runs: Iterable[Run],
    cache: Cache,
    data: Path | None,
    device: str = "cpu",
    jobs: int = 1,
    minutes: float = float("inf"),
    say: Callable[[str], None] = print,
) -> list[Run]:
    """Do all that are not in the cache yet, in their order; those that failed, or were not begun in time."""
    todo = [run for run in dict.fromkeys(runs) if run not in cache]
    began = time.monotonic()
    waiting, failed = list(reversed(todo)), []
    under_way: dict[Future[Outcome], Run] = {}

    def keep(future: Future[Outcome]) -> None:
        run = under_way.pop(future)
        done = len(todo) - len(waiting) - len(under_way)
        head = f"[{done}/{len(todo)}, {time.monotonic() - began:.0f} s] {run.title}"
        try:
            outcome = future.result()
        except Exception as problem:  # the others are worth having
            failed.append(run)
            say(f"{head}: FAILED: {type(problem).__name__}: {problem}")
            return
        cache.keep(run, outcome)
        value = f", {outcome['metric']} {outcome['value']:.4f}" if run.looks else ""
        say(f"{head}: took {outcome['took_s']:.1f} s{value}")

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads_of(jobs),)) as pool:
        try:
            while waiting or under_way:
                while waiting and len(under_way) < jobs and time.monotonic() < began + 60 * minutes:
                    run = waiting.pop()
                    under_way[pool.submit(perform, run, data, device)] = run
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    keep(future)
        except BaseException:  # an interrupt does not wait for runs that are under way
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return [*failed, *reversed(waiting)]


def threads_of(jobs: int) -> int:
    """Small batches gain little from more than two."""
    return max(1, min(2, multiprocessing.cpu_count() // jobs))
