"""The end of an attachment: all ranks get the published model, and part."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.core.pending import block_on
from offbeat.core.session import Session
from offbeat.worlds.processes.elastic.port import ElasticPort
from offbeat.worlds.processes.failure import CLOSE, GRACE_S
from offbeat.worlds.processes.port import ProcessPort


def publish_for_good(port: ProcessPort | ElasticPort, session: Session[Any]) -> None:
    """Give every rank the published model. Ranks may still train that come to their end later."""
    if isinstance(port, ElasticPort):  # others may train on without this one, or have left
        return
    with session.ledger.paused():
        block_on(session.drain())
        if port.standalone or port.alone:
            block_on(session.publish(alone=True))
            if port.client is not None:
                port.client.confirm()
            return
        if port.client is None:
            port.meet(CLOSE)
            optimizer = session.replica.optimizer
            optimizer.forget_prediction()
            block_on(session.publish())
            block_on(session.check_identical())
            with torch.no_grad():
                optimizer.keep_prediction()  # what was late is in the weights now, so it is in the state
            return
        # Ranks with steps left may wait for this one's clock: all but the last leave the server at once.
        reader = port.failures.arrive("reader")
        if reader:
            block_on(session.publish(alone=True))
        else:
            port.client.leave()
        port.meet(CLOSE)
        port.client.confirm()  # this rank may have left long ago
        block_on(session.share_published(port.failures.arrived_last("reader")))


def disconnect(port: ProcessPort | ElasticPort, session: Session[Any], failure: BaseException | None) -> None:
    """Finish pending communication; after a failure, tell the other ranks the reason instead."""
    if port.alone or (port.standalone and failure is None):
        with session.ledger.paused():
            block_on(session.drain())
        port.close()
        return
    if failure is not None:
        port.leave(f"{type(failure).__name__}: {failure}")
        port.abandon()
        if port.client is not None:
            port.client.leave()
        return
    with session.ledger.paused():
        block_on(session.drain())
    port.leave("")
    if port.client is not None:
        port.client.leave()  # at once: ranks with steps left may wait for this one's clock
    try:
        port.wait_for_exit()
    except BaseException:
        if port.client is not None:
            port.client.close(GRACE_S)
        raise
    port.close()
