"""A worker whose host is cut off for good, in real network namespaces: it ends, the others train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.support.hosts import Hosts

from offbeat.worlds.processes.server.auth import TOKEN
from offbeat.worlds.processes.server.bootstrap import SERVER
from tests.support.host_processes import HostProcess, cut, needs_namespaces
from tests.support.limits import HANG_S

pytestmark = pytest.mark.processes

TIMEOUT_S = 10.0
TCP_PORT = 29600
TRAINING = f"""
sys.path[:0] = {[str(Path(__file__).parents[4])]!r}
import offbeat
from tests.support.counting import *
model = Counting(2)
optimizer = counting_optimizer(model)
try:
    timeout_s = float(os.environ["TIMEOUT_S"])
    sync = offbeat.attach(model, optimizer, offbeat.ASP(overlap=False), timeout_s=timeout_s)
    for line in sys.stdin:
        count_on(model, optimizer)
        print("stepped", flush=True)
    sync.close(publish=False)
except offbeat.RankLost as lost:
    print("lost:", lost, flush=True)
"""


@needs_namespaces
def test_a_worker_that_is_cut_off_for_good_ends_by_its_timeout_and_harms_nobody(tmp_path: Path) -> None:
    with Hosts(count=2, rate="1gbit") as hosts:
        address = f"{hosts.address(0)}:{TCP_PORT}"
        where = {TOKEN: "secret", SERVER: address}
        options = ("--workers", "2", "--listen", address, "--snapshots", str(tmp_path))
        server = HostProcess(hosts, 0, "offbeat", "serve", *options, **where)
        server.hear("serving ")
        near = HostProcess(hosts, 0, "-c", TRAINING, TIMEOUT_S=str(HANG_S), **where)
        server.hear("training: ")  # what this worker says, with its patience
        far = HostProcess(hosts, 1, "-c", TRAINING, TIMEOUT_S=str(TIMEOUT_S), **where)
        for worker in (near, far):
            worker.write("step")  # the first one waits until both have joined
        for worker in (near, far):
            worker.hear("stepped")
        cut(hosts, 1)
        far.write("step")
        far.hear("lost: shard 0 of the server")
        near.write("step")
        near.hear("stepped")
        assert near.end()[0] == 0
        far.end()
        hosts.kill_all()  # the shard would wait for the one that is cut off as long as the first worker
        server.end()
