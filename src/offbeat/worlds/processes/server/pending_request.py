"""PendingRequest: an operation in progress on all shards, as its worker waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from offbeat.core.pending import Pending
from offbeat.core.port import PullResult
from offbeat.errors import RankLost
from offbeat.server.client import Operation
from offbeat.worlds.processes.server.channel import Request, ShardChannel

if TYPE_CHECKING:
    from offbeat.worlds.processes.server.transport import TcpTransport

T = TypeVar("T")


class PendingRequest(Pending[T]):
    """An operation in progress on all shards."""

    def __init__(
        self,
        transport: TcpTransport,
        operation: Operation,
        requests: list[tuple[ShardChannel, Request]],
        receive: Callable[[], T],
        *,
        sent: int,
        nbytes: int,
        on_host: int = 0,
    ) -> None:
        self._transport = transport
        self._operation = operation
        self._requests = requests
        self._receive = receive
        # A slower link, if emulated, is busy from now on.
        self._nbytes = nbytes
        self._on_host = on_host  # bytes that do not leave the host
        self._shaper = None if transport.ledger.is_paused else transport.shaper
        self._delivered_at = self._shaper.deliver(nbytes) if self._shaper else 0.0
        self._error: RankLost | None = None
        self._value: T
        self._done = False
        transport.ledger.operation_started()
        transport.ledger.sent(sent)

    def done(self) -> bool:
        return self._done

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self) -> None:
        began, ledger = time.monotonic(), self._transport.ledger
        for channel, request in self._requests:
            if self._error is None:
                self._error = channel.finish(request, began + self._transport.timeout_s)
        if self._error is None:
            self._error = self._transport.rejoin_if_fenced(began + self._transport.timeout_s)
        told = [request.looked_s for _, request in self._requests]
        blocked_s = time.monotonic() - began
        looked_s, pause_s = self._transport.debt.settle(told, blocked_s)
        ledger.operation_ended()
        if self._error is None:
            if self._shaper is not None:
                time.sleep(max(0.0, self._delivered_at - time.monotonic()))
                self._shaper.delivered(self._nbytes)
            self._value = self._receive()
            # The answers may have arrived long before; the channels' threads have recorded when.
            began_s = min(request.began_s for _, request in self._requests)
            ended_s = max(request.ended_s for _, request in self._requests)
            staleness = self._value.staleness if isinstance(self._value, PullResult) else None
            ended_s = max(ended_s, self._delivered_at)
            ledger.record_span(
                *self._operation, began_s, ended_s, nbytes=self._nbytes + self._on_host, staleness=staleness
            )
        self._done = True
        ledger.waited(time.monotonic() - began, looked_s)
        if pause_s and not ledger.is_paused:
            with ledger.paused():
                time.sleep(pause_s)
