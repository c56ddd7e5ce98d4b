"""Execution of runs in several processes; each outcome is cached as a line of JSON."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.papers.claims import Outcome, Run
from offbeat.core.ledger import Ledger
from offbeat.core.settings import build, lookup, parse_pairs
from offbeat.core.strategy import Strategy
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback, Worker
from offbeat.experiments.summary import summarize
from offbeat.experiments.tasks import Batch, Data, Task, task
from offbeat.experiments.virtual_run import simulate
from offbeat.strategies import STRATEGIES
from offbeat.worlds.virtual.cluster import Cluster, Slowdown, load_cluster
from offbeat.worlds.virtual.step_times import Lognormal

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW}
LATE = 1 / 3  # last fraction of a run, in which the step time is steady


class Cache:
    """Outcomes by run, in files of JSON lines: reads all files of a folder, writes to one."""

    def __init__(self, folder: Path, name: str = "runs") -> None:
        self.folder = folder
        self._path = folder / f"{name}.jsonl"
        self._outcomes: dict[str, Outcome] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    kept = json.loads(line)
                except json.JSONDecodeError:  # the writing process was killed
                    continue
                run = kept["run"]
                if "looks" in run:  # the field's name until 2026-11-16
                    run["evaluations"] = run.pop("looks")
                self._outcomes[json.dumps(run, sort_keys=True)] = kept["outcome"]

    def __contains__(self, run: Run) -> bool:
        return _json_key(run) in self._outcomes

    def __getitem__(self, run: Run) -> Outcome:
        return self._outcomes[_json_key(run)]

    def get(self, run: Run) -> Outcome | None:
        """Return the outcome of a run; None: it is not cached."""
        return self._outcomes.get(_json_key(run))

    def add(self, run: Run, outcome: Outcome) -> None:
        """Append an outcome to the file, on a line of its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(
                ("\n" if cut_off else "")
                + json.dumps({"run": json.loads(run.key), "outcome": outcome})
                + "\n"
            )
        self._outcomes[_json_key(run)] = outcome


def _json_key(run: Run) -> str:
    """Return the key as it reads after JSON, which turns tuples into lists."""
    return json.dumps(json.loads(run.key), sort_keys=True)


class StepTimes(Callback):
    """Times at which worker 0 finished each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def stepped(self, step: int, loss: Tensor, worker: Worker) -> None:
        self.seconds.append(worker.seconds)

    @property
    def late_step_s(self) -> float:
        """Mean seconds per step in the last part of the run."""
        count = max(1, int(len(self.seconds) * LATE))
        return (self.seconds[-1] - self.seconds[-1 - count]) / count


def perform(run: Run, data: Path | None, device: str = "cpu") -> Outcome:
    """Simulate a run; return its summary, with step time, throughput and machine."""
    began = time.perf_counter()
    what = task(
        run.task, model=run.model, batch_size=run.batch_size, **({} if run.lr is None else {"lr": run.lr})
    )
    if run.optimizer:
        what = with_optimizer(what, run.optimizer)
    if run.precision:
        what = in_bfloat16(what)
    job = Job(
        task=what if run.evaluations else without_evaluation(what),
        strategy=strategy_of(run),
        workers=run.workers,
        seed=run.seed,
        steps=run.steps,
        evaluate_every=-(-run.steps // run.evaluations) if run.evaluations else run.steps,
        order=run.order,
        schedule=run.schedule,
        work=run.work,
    )
    times = StepTimes()
    of_workers: list[Ledger] = []

    def watchers(ledgers: list[Ledger]) -> Sequence[Callback]:
        of_workers.extend(ledgers)
        return [times]

    samples = load(what, data, device)
    history = simulate(job, cluster_of(run), samples, watchers, device)
    entries = [ledger.totals() for ledger in of_workers]
    rate = sum(entry.steps / entry.seconds for entry in entries)  # each worker's, until it is done
    return summarize(
        job,
        "virtual",
        history,
        entries,
        complete=True,
        late_step_s=times.late_step_s,
        rate=rate,
        took_s=time.perf_counter() - began,
        machine=f"{torch.cuda.get_device_name() if device != 'cpu' else 'CPU'}, torch {torch.__version__}",
    )


def strategy_of(run: Run) -> Strategy[Any]:
    """Build the run's strategy."""
    return build(lookup("strategy", run.strategy, STRATEGIES), parse_pairs(run.settings))


def cluster_of(run: Run) -> Cluster:
    """Return the preset with the run's number of workers; `step_s` scales the step times of all."""
    cluster = load_cluster(run.cluster).for_workers(run.workers)
    if run.step_s is None:
        return cluster
    usual = cluster.workers[0].step_s
    usual_s = usual.median_s if isinstance(usual, Lognormal) else usual
    assert isinstance(usual_s, float), f"{run.cluster}: its first group has no typical step time"
    slow = Slowdown(workers=tuple(range(run.workers)), factor=run.step_s / usual_s)
    return replace(cluster, slow=(*cluster.slow, slow))


def without_evaluation(what: Task) -> Task:
    """Return the same task without evaluation, which would be most of the work of a timed run."""

    class Unevaluated(type(what)):  # type: ignore[misc]
        def evaluate(self, model: nn.Module, data: Data) -> float:
            return float("nan")

        def extra_metrics(self, model: nn.Module, data: Data) -> dict[str, float]:
            return {}

    return Unevaluated(**vars(what))


def with_optimizer(what: Task, name: str) -> Task:
    """Return the same task with one of `OPTIMIZERS` at the task's learning rate."""

    class Other(type(what)):  # type: ignore[misc]
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return OPTIMIZERS[name](model.parameters(), lr=self.lr)  # type: ignore[call-arg]

    return Other(**vars(what))


def in_bfloat16(what: Task) -> Task:
    """Return the same task with mixed precision: autocast to bfloat16, and images with channels last.

    Weights, gradients, optimizers and exchanges stay float32: so people train, and a GPU is faster at it.
    """

    class Mixed(type(what)):  # type: ignore[misc]
        def build(self) -> nn.Module:
            return cast(nn.Module, super().build()).to(memory_format=torch.channels_last)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            with torch.autocast(batch[0].device.type, torch.bfloat16):
                return cast(Tensor, super().loss(model, batch))

    return Mixed(**vars(what))


@lru_cache(maxsize=4)
def _load_cached(name: str, data: Path | None, device: str) -> Data:
    return task(name).load(data).to(device)


def load(what: Task, data: Path | None, device: str) -> Data:
    """Load a task's data; a process keeps it, because unpacking takes longer than some runs."""
    return _load_cached(what.name, data, device)


def perform_all(
    runs: Iterable[Run],
    cache: Cache,
    data: Path | None,
    device: str = "cpu",
    jobs: int = 1,
    minutes: float = float("inf"),
    say: Callable[[str], None] = print,
) -> list[Run]:
    """Execute the runs that are not cached; return those that failed or did not start in time."""
    todo = [run for run in dict.fromkeys(runs) if run not in cache]
    began = time.monotonic()
    waiting, failed = list(reversed(todo)), []
    running: dict[Future[Outcome], Run] = {}

    def finish(future: Future[Outcome]) -> None:
        run = running.pop(future)
        done = len(todo) - len(waiting) - len(running)
        head = f"[{done}/{len(todo)}, {time.monotonic() - began:.0f} s] {run.title}"
        try:
            outcome = future.result()
        except Exception as problem:  # continue with the other runs
            failed.append(run)
            say(f"{head}: FAILED: {type(problem).__name__}: {problem}")
            return
        cache.add(run, outcome)
        value = f", {outcome['metric']} {outcome['value']:.4f}" if run.evaluations else ""
        say(f"{head}: took {outcome['took_s']:.1f} s{value}")

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads_of(jobs),)) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < jobs and time.monotonic() < began + 60 * minutes:
                    run = waiting.pop()
                    running[pool.submit(perform, run, data, device)] = run
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    finish(future)
        except BaseException:  # on an interrupt, do not wait for running processes
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return [*failed, *reversed(waiting)]


def threads_of(jobs: int) -> int:
    """Return the threads per process: at most two, because small batches gain little from more."""
    return max(1, min(2, multiprocessing.cpu_count() // jobs))
