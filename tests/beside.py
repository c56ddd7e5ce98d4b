"""A parameter server whose shards are threads of the ranks: it starts in no time, over links that are real.

tests/processes has those that are processes; a suite that attaches some hundred times cannot wait for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.worlds import enrolment
from offbeat.worlds.serving import Post, Shard


class Beside:
    """Stands in for a Keeper."""

    pid = None

    def __init__(self, post: Post, token: bytes) -> None:
        client = dist.TCPStore(post.host, post.port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(post.prefix, client)
        self._thread = Thread(target=Shard(replace(post, parent=os.getppid()), store, token).run, daemon=True)
        self._thread.start()

    def release(self, patience_s: float) -> None:
        self._thread.join(patience_s)
        assert not self._thread.is_alive()


def lightly(function: Callable[..., Any], *args: Any) -> Any:
    """What a rank of a crew is told to do, with servers beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrolment, "Keeper", Beside)
        return function(*args)
