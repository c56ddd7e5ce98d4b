"""SharedSampler: batches that all workers of a user's loop share, so that fast ones do more of them.

    sampler = offbeat.SharedSampler(data, batch_size=32, sync=sync)
    loader = DataLoader(data, batch_sampler=sampler)
    for epoch in sampler.epochs(10):
        for batch in loader:
            …                  # one step
            sampler.done()

For strategies that do not move in step (ASP, SSP, DSSP, GSSP, Oscars, and DiLoCo on a server with a quorum or
`grace_s`): workers do different numbers of steps.
Each batch of an epoch is claimed by one worker, from a counter in the store through which the workers met; a
worker claims its next batches in the background, while it trains (`data/work.py`). What a dead worker had
claimed and not reported as done goes to the others (`worlds/processes/leases.py`), at the end of an epoch or,
at the latest, of the last one.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import Sampler

from offbeat.core.fields import Number, Whole, read_inside
from offbeat.core.strategy import Strategy
from offbeat.data.batching import shuffled
from offbeat.data.work import AHEAD_LEFT, ClaimsAhead
from offbeat.errors import LaunchError, MismatchError, OffbeatError, SettingError
from offbeat.worlds.processes.leases import Batch, Leases
from offbeat.worlds.processes.store import DeadlineStore

LEASE_S = 10.0
POLL_S = 0.1

_made: Counter[str] = Counter()  # workers make their samplers in the same order, so they number them alike


class AttachedStrategy(Protocol):
    """The `sync` of a user's loop."""

    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def port(self) -> Any: ...


class SharedSampler(Sampler[list[int]]):
    """Batch sampler whose batches all workers share.

    data         the data set, or its length
    batch_size   samples per batch; the last batch of an epoch may have fewer, unless `drop_last`
    sync         what `offbeat.attach` returned; None: the workers are those of torch's process group
    lease_s      seconds without a sign of life after which a worker's batches go to others

    Call `done()` after each step, and take the epochs from `epochs()`.
    """

    def __init__(
        self,
        data: int | Sized,
        batch_size: int,
        *,
        sync: AttachedStrategy | None = None,
        seed: int = 0,
        drop_last: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        self.samples = data if isinstance(data, int) else len(data)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        read_inside("batch_size", Whole(at_least=1), batch_size)
        read_inside("seed", Whole(), seed)
        read_inside("lease_s", Number(noun="seconds", above=0), lease_s)
        full, rest = divmod(self.samples, batch_size)
        self._per_epoch = full + bool(rest and not drop_last)
        if not self._per_epoch:
            raise SettingError(f"{self.samples} samples leave no batch of {batch_size}")
        store, rank, self._world = _workers(sync)
        _made["samplers"] += 1
        store = store.prefixed(f"shared/{_made['samplers']}")
        _check_alike(store, [self.samples, batch_size, seed, drop_last])
        self._lease_s = lease_s
        self._leases = Leases(store, f"{rank}-{uuid.uuid4().hex[:8]}", self._per_epoch, lease_s)
        self._thread = ThreadPoolExecutor(1, "offbeat-claims")  # all calls of the store, in order
        self._reports: deque[Future[None]] = deque()
        self._taken: deque[Batch] = deque()  # and not reported as done, the oldest first
        self._adopted: deque[Batch] = deque()
        self._last_epoch: int | None = None
        self._reported = 0

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs; the last one again, where dead workers have left batches.

        In the end, wait for the batches that other workers have, in case these die. A worker that has waited
        for a lease while all of them live ends: whoever has the last batches also does what is left.
        """
        self._last_epoch = count - 1
        for epoch in range(count):
            self.set_epoch(epoch)
            yield epoch
        while self._adopt_at_last(count):
            yield count - 1
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration claims."""
        self.epoch = epoch

    def done(self) -> None:
        """Report that the step of the oldest batch that was taken has ended."""
        if not self._taken:
            raise OffbeatError("done() was called more often than batches were taken")
        batch = self._taken.popleft()
        self._reported += 1
        self._report(self._thread.submit(self._leases.done, batch))

    def close(self) -> None:
        """Leave the batches that this worker has taken and not done to others."""
        self._thread.submit(self._leases.close).result()
        for report in self._reports:
            report.result()

    def __iter__(self) -> Iterator[list[int]]:
        self._check_reports()
        epoch = self.epoch
        spare = AHEAD_LEFT * self._world if epoch == self._last_epoch else 0
        claims = ClaimsAhead(lambda: self._leases.claim(epoch), self._per_epoch, spare, self._thread)
        while (batch := self._next(claims, epoch)) is not None:
            self._taken.append(batch)
            order = shuffled(self.samples, self.seed, batch.epoch)
            begin = batch.number * self.batch_size
            yield order[begin : begin + self.batch_size].tolist()

    def _next(self, claims: ClaimsAhead, epoch: int) -> Batch | None:
        """Return the next batch: one that the others have left, or a new one; None: there is none now."""
        if not self._adopted:
            number = claims.claim()
            if number is not None:
                return Batch(epoch, number)
            self._adopt(epoch + 1)
        return self._adopted.popleft() if self._adopted else None

    def _adopt(self, epochs: int) -> dict[Batch, str]:
        """Claim one orphan, if there is one; return the batches that living workers have."""

        def look() -> dict[Batch, str]:
            orphans, held = self._leases.look(epochs)
            for batch in orphans:
                if not self._adopted and self._leases.adopt(batch):
                    self._adopted.append(batch)
                else:
                    held[batch] = ""  # another worker may have it
            return held

        return self._thread.submit(look).result()

    def _adopt_at_last(self, epochs: int) -> bool:
        """Wait for a batch that a dead worker has left; return False if all are done or in living hands."""
        self._check_reports()
        before: dict[Batch, str] = {}
        deadline = time.monotonic()
        while True:
            held = self._adopt(epochs)
            if self._adopted or not held:
                return bool(self._adopted)
            if held != before:
                before, deadline = held, time.monotonic() + 2 * self._lease_s
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)

    def _check_reports(self) -> None:
        """Raise an error if no batch was reported; after a `break`, leave those that were not to others."""
        if self._taken and not self._reported:
            raise OffbeatError(
                f"{len(self._taken)} batches were taken and none was reported: call done() after each step, "
                "so that only what a dead worker has not done goes to others"
            )
        self._taken.clear()
        self._report(self._thread.submit(self._leases.keep_only, set(self._adopted)))

    def _report(self, report: Future[None]) -> None:
        """Keep a report to the store in progress; raise the error of an earlier one that failed."""
        self._reports.append(report)
        while self._reports and self._reports[0].done():
            self._reports.popleft().result()


def _workers(sync: AttachedStrategy | None) -> tuple[DeadlineStore, int, int]:
    """Return the store through which the workers met, this worker's rank, and their number."""
    if sync is not None:
        half = sync.strategy.server_half()
        if half is None or half.in_step:
            raise SettingError(
                f"under {sync.strategy.name} all workers do equally many steps: use DistributedSampler"
            )
        return DeadlineStore.of(sync.port.failures.store), sync.port.rank, sync.port.world
    if not dist.is_initialized():
        raise LaunchError("there is no process group to share batches in: give sync=, or start with torchrun")
    return DeadlineStore(_get_default_store()).prefixed("offbeat"), dist.get_rank(), dist.get_world_size()


def _check_alike(store: DeadlineStore, own: list[int]) -> None:
    """Raise an error if another worker divides other data, or divides them otherwise."""
    first = json.loads(store.compare_set("settings", "", json.dumps(own)))
    if first != own:
        raise MismatchError(
            f"workers share batches of (samples, batch_size, seed, drop_last) {first}, here {own}: give all "
            "of them the same"
        )
