"""Authentication: each end of a connection proves that it knows the token."""

from __future__ import annotations

import pytest
import torch

from offbeat.worlds.processes.server.auth import challenge, prove
from tests.support.beside import beside
from tests.support.connections import close, connection_pair
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("token", "right"), [(b"secret", True), (b"guess", False), (b"", False)])
def test_only_who_knows_the_token_proves_it(token: bytes, right: bool) -> None:
    server, worker = connection_pair()
    proved = beside(prove, worker, token)
    assert challenge(server, b"secret") is right
    assert proved.result(HANG_S) is right, "the worker learns it too"
    close(server, worker)


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    """Be it that it sends back what the worker itself has said."""
    server, worker = connection_pair()
    proved = beside(prove, worker, b"secret")
    said = torch.zeros(64, dtype=torch.uint8)
    server.send(torch.zeros(32, dtype=torch.uint8))
    server.receive(said)
    server.send(said[32:])
    assert proved.result(HANG_S) is False
    close(server, worker)
