"""Parameter servers in virtual time, with the seconds that their messages take."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from offbeat.experiments.job import Job
from offbeat.experiments.tasks.digits import Digits
from offbeat.experiments.virtual_run import simulate
from offbeat.worlds.virtual.cluster import Absence, Cluster, ServerMachines, Slowdown, Workers
from offbeat.worlds.virtual.messages import REQUEST_BYTES
from offbeat.worlds.virtual.step_times import Exponential, Lognormal, Stragglers
from tests.support.virtual_runs import BYTES_PER_S, WEIGHTS, AnyStrategy, cluster_of

STEPS = 6
ONE_NIC = ServerMachines(up_bits_per_s=8 * BYTES_PER_S, down_bits_per_s=8 * BYTES_PER_S)
WIDE = ServerMachines(up_bits_per_s=1e12, down_bits_per_s=1e12)  # only the workers' own links count
ASK_S, SEND_S = REQUEST_BYTES / BYTES_PER_S, WEIGHTS / BYTES_PER_S
TRIP_S = 2 * SEND_S + ASK_S
seconds = st.sampled_from([0.001, 0.01, 0.3])
step_times = st.one_of(
    seconds,
    st.builds(Lognormal, median_s=seconds, sigma=st.just(0.8)),
    st.builds(Exponential, least_s=seconds, tail_s=seconds),
    st.builds(Stragglers, usual_s=seconds, probability=st.just(0.3), factor=st.just(7.0)),
)
rates = st.sampled_from([1e5, 1e6, 3e7])
nic: dict[str, Any] = {
    "up_bits_per_s": rates,
    "down_bits_per_s": rates,
    "latency_s": st.sampled_from([0.0, 1e-4]),
}
groups = st.builds(Workers, step_s=step_times, count=st.integers(1, 2), **nic)
clusters = st.builds(
    Cluster,
    workers=st.lists(groups, min_size=1, max_size=3).map(tuple),
    slow=st.sampled_from([(), (Slowdown(workers=(0,), from_s=0.02, until_s=0.5, factor=6),)]),
    away=st.sampled_from([(), (Absence(worker=0, from_s=0.01, until_s=0.4),)]),
    server=st.one_of(st.none(), st.builds(ServerMachines, count=st.integers(1, 2), **nic)),
    operation_s=st.sampled_from([0.0, 2e-4]),
    update_share=st.sampled_from([0.0, 0.1]),
)


@cache
def accuracy(strategy: AnyStrategy, last_s: float) -> float:
    """Of four workers, seed 0."""
    cluster = cluster_of(0.05, 0.05, 0.05, last_s)
    job = Job(task=Digits(), strategy=strategy, workers=4, epochs=10, evaluate_every=10_000)
    return simulate(job, cluster, Digits().load())[-1].value
