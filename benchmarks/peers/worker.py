"""Training of one rank in one case. Loop, data order, seeds, model and clock are the same for all contenders.

Without a server, training is divided into rounds. Ranks start a round together; a rank's seconds last until
it has taken the round's steps and its pending communication is done; the round lasts as long as its slowest
rank. Between rounds, outside the measured time, the ranks form the global model and rank 0 evaluates it.

With a server, ranks do not wait for each other. Seconds are wall-clock time, and rank 0 reads the model from
the server from time to time, inside the measured time. The copies are evaluated at the end.
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

from benchmarks.peers.cases import CPU, CUT, DONE, REACHED, SEARCH, Case, Evaluation, Outcome
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.tasks import PeerTask
from benchmarks.peers.training import RankSetup, Training
from benchmarks.support.hosts import INTERFACE
from benchmarks.support.workers import slowest
from offbeat.data.batching import batches, steps_per_epoch
from offbeat.experiments.loop import seed_step
from offbeat.experiments.tasks import Data
from offbeat.worlds.processes.emulation import pace

FIRST_EVALUATION = 10  # steps; shows how long a step takes
COUNT_EVERY = 10  # steps after which an independent rank adds its steps to the total


def bytes_sent() -> int:
    """Return the bytes sent by this host. (`/sys` shows the namespace that it was mounted in.)"""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"this host has no network interface {INTERFACE}")


@dataclass(frozen=True)
class Run:
    """A rank's part of a case."""

    case: Case
    peer_task: PeerTask
    data: Data
    limit_s: float
    setup: RankSetup
    training: Training

    @property
    def steps(self) -> int:
        """Steps of each rank, if all take the same number."""
        per_epoch = steps_per_epoch(len(self.data), self.setup.world, self.peer_task.batch_size)
        return max(1, round(self.case.epochs * per_epoch))

    def batches(self) -> Iterator[Tensor]:
        size, seed = self.peer_task.batch_size, self.case.seed
        return batches(len(self.data), self.setup.rank, self.setup.world, size, seed, self.data.lengths)

    def wait_pending(self) -> None:
        """Wait for pending communication, and for the GPU."""
        self.training.wait_pending()
        if self.case.device != CPU:
            torch.cuda.synchronize()

    def train(self, number: int, order: Iterator[Tensor]) -> None:
        """Take step `number` on the next batch."""
        seed_step(self.case.seed, self.setup.rank, number)
        self.training.step(self.data.batch(next(order)))


def work(case: Case, peer_task: PeerTask, data: Data, limit_s: float) -> Outcome:
    """Train one rank; the outcome of rank 0 counts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    contender = CONTENDERS[case.contender]
    settings = {**contender.fixed, **case.settings}
    torch.manual_seed(case.seed)
    model = peer_task.task.build().to(case.device)
    optimizer = peer_task.task.optimizer(model)
    if slowness := peer_task.slowness(case.workers, rank):
        pace(model, peer_task.pace_s, factor=slowness)
    data = data.to(case.device)
    setup = RankSetup(
        task=peer_task.task, model=model, optimizer=optimizer, rank=rank, world=world, settings=settings
    )
    with contender.open(setup) as training:
        run = Run(case, peer_task, data, limit_s, setup, training)
        if not training.independent:
            ended, history = train_in_rounds(run)
        else:
            ended, copies, counts = train_independently(run)
    dist.barrier()  # rank 0 holds the store, so it must exit last
    if training.independent:
        history = evaluate(run, copies, counts) if rank == 0 else []
    return Outcome(case=case, ended=ended, history=tuple(history), limit_s=limit_s)


# --- ranks that train in rounds


def next_evaluation(done: int, seconds: float, steps: int, every: int, limit_s: float, start: int = 0) -> int:
    """Return the step of the next evaluation: every `every` steps from `start` on, and at the time limit."""
    if done == 0:
        return min(FIRST_EVALUATION, steps)
    left = int((limit_s - seconds) / (seconds / done))
    return min(max(start, (done // every + 1) * every), steps, done + max(1, left))


def train_in_rounds(run: Run) -> tuple[str, list[Evaluation]]:
    """Train in rounds that end with an evaluation; return how training ended, and the evaluations."""
    task, training, rank = run.peer_task.task, run.training, run.setup.rank
    order, history = run.batches(), list[Evaluation]()
    done, seconds, nbytes = 0, 0.0, 0
    start = run.peer_task.search_from if run.case.purpose == SEARCH else 0
    while True:
        until = next_evaluation(done, seconds, run.steps, run.peer_task.evaluate_every, run.limit_s, start)
        dist.barrier()
        sent, began = bytes_sent(), time.perf_counter()
        for number in range(done + 1, until + 1):
            run.train(number, order)
        run.wait_pending()
        took = time.perf_counter() - began
        done = until
        dist.barrier()  # other ranks may make this one send more
        totals = torch.tensor([bytes_sent() - sent, 0.0], dtype=torch.float64)
        with training.global_model():
            if rank == 0:
                totals[1] = task.evaluate(run.setup.model, run.data)
        seconds += slowest(took)
        dist.all_reduce(totals)
        nbytes += int(totals[0])
        history.append(Evaluation(done, seconds, totals[1].item(), nbytes))
        if run.case.purpose == SEARCH and run.peer_task.reached(totals[1].item()):
            return REACHED, history
        if done >= run.steps:
            return DONE, history
        if seconds >= run.limit_s:
            return CUT, history


# --- ranks that do not wait for each other

Counts = list[tuple[float, float]]  # seconds, bytes sent until then
Copy = tuple[int, float, list[Tensor]]  # steps of all, seconds, weights


def train_independently(run: Run) -> tuple[str, list[Copy], list[Counts]]:
    """Train without rounds; return how training ended, copies of the model, and bytes sent by all ranks."""
    training = run.training
    store, order = dist.distributed_c10d._get_default_store(), run.batches()
    copies: list[Copy] = []
    counts: Counts = []
    number = total = 0
    dist.barrier()
    began, sent = time.perf_counter(), bytes_sent()
    while (now := time.perf_counter() - began) < run.limit_s and total < run.steps * run.setup.world:
        number += 1
        run.train(number, order)
        if number % COUNT_EVERY == 0:
            total = store.add("steps of all", COUNT_EVERY)
            counts.append((time.perf_counter() - began, bytes_sent() - sent))
        if run.setup.rank == 0 and number % run.peer_task.evaluate_every == 0:
            copies.append((total, time.perf_counter() - began, copy_weights(run)))
    run.wait_pending()
    if run.setup.rank == 0:
        copies.append((store.add("steps of all", 0), now, copy_weights(run)))
    training.leave()
    counts.append((time.perf_counter() - began, bytes_sent() - sent))
    of_ranks: list[Counts] = [[] for _ in range(run.setup.world)]
    dist.all_gather_object(of_ranks, counts)
    dist.barrier()
    return (DONE if total >= run.steps * run.setup.world else CUT), copies, of_ranks


def copy_weights(run: Run) -> list[Tensor]:
    """Copy the weights of the global model."""
    with run.training.global_model():
        return [parameter.detach().clone() for parameter in run.setup.model.parameters()]


def evaluate(run: Run, copies: list[Copy], of_ranks: list[Counts]) -> list[Evaluation]:
    """Evaluate copies of the model."""
    history, model = [], run.setup.model
    for steps, seconds, weights in copies:
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        value = run.peer_task.task.evaluate(model, run.data)
        nbytes = sum(bytes_sent_at(seconds, counts) for counts in of_ranks)
        history.append(Evaluation(steps // run.setup.world, seconds, value, int(nbytes)))
    return history


def bytes_sent_at(seconds: float, counts: Counts) -> float:
    """Return the bytes that a rank had sent by then: its next count at or after that time."""
    return counts[min(bisect_left(counts, (seconds, 0.0)), len(counts) - 1)][1]
