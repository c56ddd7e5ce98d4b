"""Bootstrap: how a worker and a server find each other and agree on what the server holds."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import offbeat
from offbeat.worlds.processes.server.bootstrap import Rendezvous
from tests.support.served import serve as serve

pytestmark = pytest.mark.processes


def test_what_is_no_server_is_told_apart_after_the_timeout() -> None:
    """A store at which nobody ever puts anything up."""
    with pytest.raises(
        offbeat.LaunchError, match="nowhere:9 has published nothing for 0 s: is it `offbeat serve`"
    ):
        Rendezvous(dist.HashStore(), "nowhere", 9, timeout_s=0.1).check(b"secret")
