"""Way: one worker's way to one shard of the server: a link, and what is under way on it.

When the link fails (the shard crashed, the network did), the way is mended: a new link is made, and what was
under way is sent again. A shard that already has a push knows it by its clock, so nothing is folded in twice.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError, RankLost
from offbeat.worlds.links import (
    HEADER,
    NEW,
    TOKEN,
    WORKER,
    Kind,
    Link,
    answered,
    finish,
    header,
    knock,
    prove,
)

LISTEN_S = 0.02
MOST_PATIENCE_S = 2.0  # between attempts; it grows from 0, and is 0 again once an answer has come
log = logging.getLogger("offbeat")


@dataclass(frozen=True)
class Caller:
    """Who asks for links: a worker, and what it needs to be let in."""

    store: dist.Store
    worker: int
    token: bytes
    timeout_s: float


@dataclass(eq=False)
class Errand:
    """A message to a shard and room for its answer."""

    message: list[Tensor]
    answer: list[Tensor]
    works: list[Any] = field(default_factory=list)

    @property
    def head(self) -> list[int]:
        numbers: list[int] = self.answer[0].tolist()
        return numbers


class Way:
    def __init__(self, caller: Caller, shard: int, where: str) -> None:
        self.where = where  # in words, for messages
        self.clock = NEW  # as acknowledged by the shard
        self.pushes = 0  # that it has acknowledged
        self.filled = False  # the shard has weights
        self._caller = caller
        self._shard = shard
        self._under_way: list[Errand] = []
        self._link: Link | None = None
        self._patience_s = 0.0
        self._open(time.monotonic() + caller.timeout_s)

    def start(self, message: list[Tensor], answer: list[Tensor]) -> Errand:
        errand = Errand(message, answer)
        self._under_way.append(errand)
        self._send(errand)
        return errand

    def finish(self, errand: Errand, deadline: float) -> RankLost | None:
        """Wait for the answer, mending the way where that is needed; what stands in the way of it, if so."""
        while True:
            try:
                for work in errand.works:
                    # Once, with all the time there is: a wait that runs out takes gloo's link down.
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                self._under_way.remove(errand)
                self._patience_s = 0.0
                self.filled = True  # without weights it would not have answered
                return None
            except RuntimeError as failed:
                if time.monotonic() > deadline:
                    return RankLost(f"{self.where} did not answer for {self._caller.timeout_s:.0f} s")
                log.warning("the way to %s is broken: mending it", self.where)
                log.debug("it broke by %s", failed)
            lost = self._mend(deadline)
            if lost is not None:
                return lost

    def leave(self) -> None:
        """Say goodbye, if there is somebody to say it to."""
        if self._link is not None:
            with suppress(RuntimeError):
                finish(self._link.send(header(Kind.LEAVE)))
            self._link.close()
            self._link = None

    def _send(self, errand: Errand) -> None:
        assert self._link is not None
        try:
            errand.works = self._link.send(*errand.message) + self._link.receive(*errand.answer)
        except RuntimeError as broken:  # it will be mended by whoever waits for the answer
            errand.works = [Broken(broken)]

    def _mend(self, deadline: float) -> RankLost | None:
        had_weights = self.filled
        if self._link is not None:
            self._link.close()
        try:
            self._open(deadline)
        except RankLost as lost:
            return lost
        if had_weights and not self.filled:
            return RankLost(f"{self.where} crashed before it had a snapshot: its weights are lost")
        for errand in self._under_way:
            self._send(errand)
        return None

    def _open(self, deadline: float) -> None:
        """Make a link, prove who we are, and join, be it after several attempts."""
        while True:
            self._link = None
            time.sleep(min(self._patience_s, max(0.0, deadline - time.monotonic())))
            self._patience_s = min(MOST_PATIENCE_S, 2 * self._patience_s + LISTEN_S)
            try:
                self._link = self._connect(deadline)
                prove(self._link, self._caller.token)
                heard = torch.zeros(HEADER, dtype=torch.int64)
                joining = self._link.send(header(Kind.JOIN, self.clock, self.pushes))
                finish(self._link.receive(heard))  # first: a stranger's JOIN is never taken
                kind, clock, _, filled = heard.tolist()
                if kind == Kind.STRANGER:
                    raise OffbeatError(f"{self.where} does not know this worker's token: check {TOKEN}")
                finish(joining)
                self.clock, self.filled = clock, bool(filled)
                return
            except OffbeatError:
                raise
            except (RuntimeError, TimeoutError) as failed:
                if time.monotonic() > deadline:
                    raise RankLost(f"{self.where} cannot be reached: {failed}") from failed

    def _connect(self, deadline: float) -> Link:
        store, shard = self._caller.store, self._shard
        prefix = knock(store, shard, self._caller.worker)
        while not answered(store, prefix):  # a shard that is started again finds the knock, too
            if time.monotonic() > deadline:
                raise TimeoutError("it does not answer the knock")
            time.sleep(LISTEN_S)
        return Link(store, prefix, WORKER, self._caller.timeout_s)


class Broken:
    """Stands for work that could not even be started."""

    def __init__(self, why: RuntimeError) -> None:
        self._why = why

    def wait(self, _: timedelta) -> None:
        raise self._why
