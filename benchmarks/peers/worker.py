"""One rank of one case. The loop, the data's order, the seeds, the model and the clock are the same for all.

Where ranks meet (all but strategies with a server), training is cut into stretches. Before a stretch all
wait for each other; a rank's seconds go from there until it has done the stretch's steps, and what it has
started has ended; the stretch took what its slowest rank took. Between stretches, out of the clock, the ranks
form the global model, and rank 0 evaluates it.

With a server nobody waits for the others: the clock is the wall's, and rank 0 asks the server for the model
now and then, inside the clock. Copies are evaluated in the end.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.hosts import CARD
from benchmarks.peers.cases import CPU, CUT, DONE, REACHED, SEARCH, Case, Look, Outcome
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.setting import Setting
from benchmarks.peers.training import Bench, Training
from offbeat.data.batching import batches, steps_per_epoch
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks import Data
from offbeat.worlds.processes.emulation import pace

FIRST_LOOK = 10  # steps; tells how long a step takes
COUNT_EVERY = 10  # steps: how often the steps of all are added up, where nobody waits for the others


def card_bytes() -> int:
    """What has left this host's card. (`/sys` shows the cards of the namespace it was mounted in.)"""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == CARD:
            return int(numbers.split()[8])
    raise RuntimeError(f"this host has no card {CARD}")


@dataclass(frozen=True)
class Run:
    """A rank's part in a case."""

    case: Case
    setting: Setting
    data: Data
    limit_s: float
    bench: Bench
    training: Training

    @property
    def steps(self) -> int:
        """What each rank does, if all do the same."""
        per_epoch = steps_per_epoch(len(self.data), self.bench.world, self.setting.batch_size)
        return max(1, round(self.case.epochs * per_epoch))

    def batches(self) -> Iterator[Tensor]:
        size, seed = self.setting.batch_size, self.case.seed
        return batches(len(self.data), self.bench.rank, self.bench.world, size, seed, self.data.lengths)

    def settle(self) -> None:
        """Wait for all that was asked for, of other ranks and of a GPU."""
        self.training.settle()
        if self.case.device != CPU:
            torch.cuda.synchronize()

    def train(self, number: int, order: Iterator[Tensor]) -> None:
        seed_step(self.case.seed, self.bench.rank, number)
        self.training.step(self.data.batch(next(order)))


def work(case: Case, setting: Setting, data: Data, limit_s: float) -> Outcome:
    """One rank. What rank 0 returns counts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    contender = CONTENDERS[case.contender]
    settings = {**contender.fixed, **case.settings}
    torch.manual_seed(case.seed)
    model = setting.task.build().to(case.device)
    optimizer = setting.task.optimizer(model)
    if slowness := setting.slowness(case.workers, rank):
        pace(model, setting.pace_s, factor=slowness)
    data = data.to(case.device)
    bench = Bench(
        task=setting.task, model=model, optimizer=optimizer, rank=rank, world=world, settings=settings
    )
    with contender.open(bench) as training:
        run = Run(case, setting, data, limit_s, bench, training)
        if not training.alone:
            ended, history = meet(run)
        else:
            ended, copies, counts = go_free(run)
    dist.barrier()  # the store is in rank 0: it ends last
    if training.alone:
        history = evaluate(run, copies, counts) if rank == 0 else []
    return Outcome(case=case, ended=ended, history=tuple(history), limit_s=limit_s)


# --- ranks that meet


def next_look(done: int, seconds: float, steps: int, every: int, limit_s: float, start: int = 0) -> int:
    """The step after which to look: at every so many from `start` on, and where the limit is."""
    if done == 0:
        return min(FIRST_LOOK, steps)
    left = int((limit_s - seconds) / (seconds / done))
    return min(max(start, (done // every + 1) * every), steps, done + max(1, left))


def meet(run: Run) -> tuple[str, list[Look]]:
    task, training, rank = run.setting.task, run.training, run.bench.rank
    order, history = run.batches(), list[Look]()
    done, seconds, nbytes = 0, 0.0, 0
    start = run.setting.search_from if run.case.purpose == SEARCH else 0
    while True:
        until = next_look(done, seconds, run.steps, run.setting.look_every, run.limit_s, start)
        dist.barrier()
        sent, began = card_bytes(), time.perf_counter()
        for number in range(done + 1, until + 1):
            run.train(number, order)
        run.settle()
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        done = until
        dist.barrier()  # others may have had to send more
        told = torch.tensor([card_bytes() - sent, 0.0], dtype=torch.float64)
        with training.looking():
            if rank == 0:
                told[1] = task.evaluate(run.bench.model, run.data)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        dist.all_reduce(told)
        seconds, nbytes = seconds + took.item(), nbytes + int(told[0])
        history.append(Look(done, seconds, told[1].item(), nbytes))
        if run.case.purpose == SEARCH and run.setting.is_there(told[1].item()):
            return REACHED, history
        if done >= run.steps:
            return DONE, history
        if seconds >= run.limit_s:
            return CUT, history


# --- ranks that do not wait for each other

Counts = list[tuple[float, float]]  # when, and how many bytes had left the card
Copy = tuple[int, float, list[Tensor]]  # steps of all, seconds, weights


def go_free(run: Run) -> tuple[str, list[Copy], list[Counts]]:
    training = run.training
    store, order = dist.distributed_c10d._get_default_store(), run.batches()
    copies: list[Copy] = []
    counts: Counts = []
    number = together = 0
    dist.barrier()
    began, sent = time.perf_counter(), card_bytes()
    while (now := time.perf_counter() - began) < run.limit_s and together < run.steps * run.bench.world:
        number += 1
        run.train(number, order)
        if number % COUNT_EVERY == 0:
            together = store.add("steps of all", COUNT_EVERY)
            counts.append((time.perf_counter() - began, card_bytes() - sent))
        if run.bench.rank == 0 and number % run.setting.look_every == 0:
            copies.append((together, time.perf_counter() - began, look(run)))
    run.settle()
    if run.bench.rank == 0:
        copies.append((store.add("steps of all", 0), now, look(run)))
    training.leave()
    counts.append((time.perf_counter() - began, card_bytes() - sent))
    everybody: list[Counts] = [[] for _ in range(run.bench.world)]
    dist.all_gather_object(everybody, counts)
    dist.barrier()
    return (DONE if together >= run.steps * run.bench.world else CUT), copies, everybody


def look(run: Run) -> list[Tensor]:
    with run.training.looking():
        return [parameter.detach().clone() for parameter in run.bench.model.parameters()]


def evaluate(run: Run, copies: list[Copy], everybody: list[Counts]) -> list[Look]:
    history, model = [], run.bench.model
    for steps, seconds, weights in copies:
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        value = run.setting.task.evaluate(model, run.data)
        nbytes = sum(sent_at(seconds, counts) for counts in everybody)
        history.append(Look(steps // run.bench.world, seconds, value, int(nbytes)))
    return history


def sent_at(seconds: float, counts: Counts) -> float:
    """What had left the card by then: the count that is nearest behind."""
    return counts[min(bisect_left(counts, (seconds, 0.0)), len(counts) - 1)][1]
