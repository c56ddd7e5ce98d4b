"""Calibration: measured times of steps and operations on the available machines, as a cluster to simulate.

All ranks compute at once, as they do in training, but exchange nothing. The links are timed with
all-reduces of two sizes, which give the rate and the fixed cost of an operation; an all-reduce of a small
tensor bounds that cost from above, and no all-reduce takes less: gloo cuts even a small tensor into several
messages, one after the other. Exchanges of slices, by which most codecs travel, and all-reduces of a single
number have least times of their own. How much traffic waits for a receiver is measured in `link_queues.py`.
What codecs, shards and exchanges with them take to compute is timed in `codec_times.py` and `server_time.py`.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.codecs import Codec
from offbeat.core.blocks import block_sizes, make_blocks, trainable_bytes
from offbeat.core.files import write_atomic
from offbeat.core.pending import block_on
from offbeat.core.port import Op
from offbeat.data.batching import batches
from offbeat.errors import LaunchError
from offbeat.experiments.codec_times import CodecTimes, codec_cost_of, time_codec, time_shard
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.server_time import time_exchange
from offbeat.experiments.tasks import Data, Task
from offbeat.worlds.processes.launcher import launch, under_launcher
from offbeat.worlds.processes.link_queues import load_bytes, measure_queue
from offbeat.worlds.processes.metrics_store import MetricsStore
from offbeat.worlds.processes.port import ProcessPort
from offbeat.worlds.processes.rendezvous import connect_group
from offbeat.worlds.virtual.cluster import Cluster, Workers, dump
from offbeat.worlds.virtual.step_times import Measured

WARM_UP = 3
SMALL_BYTES = 1 << 12
SIZES_BYTES = (1 << 20, 4 << 20)
REPEATS = 5
USUAL_QUEUE_S = 0.1  # where the queues of the links cannot be measured: what many switches and shapers hold
LEAST_QUEUE_S = 0.001  # whatever is measured

Say = Callable[[str], None]
log = logging.getLogger("offbeat")


def measure_all(
    workers: int,
    task: Task,
    options: RunOptions,
    steps: int,
    out: Path,
    say: Say,
    codecs: Sequence[Codec] = (),
) -> bool:
    """Measure on the ranks of torchrun, or else on local ranks that this function starts; write `out`.

    Return whether this process continues afterwards: it is rank 0, or has started the ranks.
    """
    if under_launcher():
        measure(task, options, steps, out, say, codecs)
        return os.environ["RANK"] == "0"
    task.load(options.data)  # reports missing data once, before the processes start
    launch(workers, measure, task, options, steps, out, say, codecs)
    return True


def measure(
    task: Task, options: RunOptions, steps: int, out: Path, say: Say, codecs: Sequence[Codec] = ()
) -> None:
    """Measure on this rank; rank 0 writes the cluster file `out` and prints the measurements."""
    device = torch.device(options.device)
    data = task.load(options.data).to(device)
    torch.manual_seed(0)
    model = task.build().to(device)
    port = connect_group(device, {"task": repr(task)}, options.timeout_s, options.bits_per_s)
    options.emulation.apply(model, port.rank)
    if port.rank:
        say = _say_nothing
    metrics = MetricsStore(port.failures.store, port.rank, port.world)
    like = next(model.parameters())
    links, queue_s = LinkTimes(), None
    if port.world > 1:
        say("timing the links …")
        links = time_links(port, like)
        queue_s = time_queue(port, like, links.bits_per_s)
    say(f"timing {steps} steps of {task.name} ({task.model}) on {port.world} ranks …")
    own = time_steps(task, data, model, port.rank, port.world, steps)
    say("timing codecs and a server's shard …" if codecs else "timing a server's shard …")
    prepare = partial(_step_together, task, data, model, port)
    timed = [time_codec(codec, model, port.world, prepare) for codec in codecs]
    shards = time_shard(model, port.world)
    exchange_s = 0.0
    if port.world > 1:
        say("timing an exchange with a server …")
        alone_s = statistics.mean(own.seconds)
        exchange_s = time_exchange(task, data, model, port.rank, port.world, options, alone_s)
    exchanges_s = metrics.gather_json(exchange_s, options.timeout_s)
    queues_s = metrics.gather_json(queue_s, options.timeout_s)
    all_timed = metrics.gather_json(list(map(asdict, timed)), options.timeout_s)
    ranks = [StepTimes(**times) for times in metrics.gather_json(asdict(own), options.timeout_s)]
    if port.rank == 0:
        if exchange_s := statistics.median(exchanges_s):  # with what shards beside workers take from them
            shards = replace(shards, exchange_s=exchange_s, beside=0.0)
        notes = "; ".join(
            [f"{task.name} ({task.model}) as measured on {port.world} ranks", *options.emulation.notes()]
        )
        costs = [
            codec_cost_of([CodecTimes(**times) for times in ranks]) for ranks in zip(*all_timed, strict=True)
        ]
        if measured := [each for each in queues_s if each is not None]:
            links = replace(links, queue_s=max(LEAST_QUEUE_S, statistics.median(measured)))
        cluster = cluster_of(notes, ranks, links)
        write_atomic(out, dump(replace(cluster, codecs=tuple(costs), shards=shards)))
        for rank, times in enumerate(ranks):
            median_ms = 1e3 * sorted(times.seconds)[len(times.seconds) // 2]
            say(f"rank {rank}: {median_ms:.2f} ms per step")
        for cost in costs:
            encode_ns, decode_ns = 1e9 * cost.encode_s, 1e9 * cost.decode_s
            say(f"{cost.codec}: {encode_ns:.3g} ns to encode a byte, {decode_ns:.3g} ns to decode one")
        say(f"a shard: {1e9 * shards.apply_s:.3g} ns to apply a byte")
        say(f"a worker: {1e9 * shards.exchange_s:.3g} ns to exchange a byte with a server, at each end")
        say(
            f"links: {links.bits_per_s / 1e6:.4g} Mbit/s, {1e3 * links.operation_s:.2f} ms per operation, "
            f"{1e3 * links.least_reduce_s:.2f} ms for the smallest all-reduce, "
            f"{1e3 * links.least_exchange_s:.2f} ms for the smallest all-gather, "
            f"{1e3 * links.least_control_s:.2f} ms for a flag"
        )
        if measured:
            say(f"queues of the links: {1e3 * links.queue_s:.3g} ms wait for a receiver")
    port.failures.leave(port.operations, "")
    port.failures.wait_for_exit(options.timeout_s)


def _step_together(task: Task, data: Data, model: nn.Module, port: ProcessPort) -> None:
    """Compute a gradient, and wait until all ranks have one."""
    model.zero_grad()
    task.loss(model, data.batch(torch.arange(min(task.batch_size, len(data))))).backward()
    if port.world > 1:
        with torch.no_grad():
            block_on(_wait(port, torch.zeros(1, device=next(model.parameters()).device)))


def _say_nothing(text: str) -> None:
    """Print nothing: only rank 0 prints."""


@dataclass(frozen=True)
class StepTimes:
    """One rank's steps: their seconds, and the fractions of a step that forward, update and blocks take."""

    seconds: list[float]
    forward_share: float
    update_share: float
    ready: list[float]


def time_steps(
    task: Task, data: Data, model: nn.Module, rank: int, world: int, steps: int, seed: int = 0
) -> StepTimes:
    """Time the steps of a loop without communication, and the completion of each block's gradient."""
    optimizers = task.optimizers(model)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    blocks = make_blocks(trained, *block_sizes(trainable_bytes(model)))
    stamps: dict[int, float] = {}
    handles = [
        param.register_post_accumulate_grad_hook(
            lambda _, index=block.index: stamps.__setitem__(index, time.perf_counter())
        )
        for block in blocks
        for param in block.params
    ]
    order = batches(len(data), rank, world, task.batch_size, seed, data.lengths)
    seconds, forward, update, ready = [], [], [], []
    for step in range(WARM_UP + steps):
        began = time.perf_counter()
        batch = data.batch(next(order))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = task.loss(model, batch)
        computed = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        task.clip(model)
        for optimizer in optimizers:
            optimizer.step()
        took = time.perf_counter() - began
        if step >= WARM_UP:
            seconds.append(took)
            forward.append((computed - began) / took)
            update.append((began + took - ended) / took)
            ready.append([(stamps.get(block.index, ended) - began) / took for block in blocks])
    for handle in handles:
        handle.remove()
    medians = [statistics.median(fractions) for fractions in zip(*ready, strict=True)]
    return StepTimes(
        seconds=seconds,
        forward_share=statistics.median(forward),
        update_share=statistics.median(update),
        ready=sorted(min(fraction, 1 - statistics.median(update)) for fraction in medians),
    )


@dataclass(frozen=True)
class LinkTimes:
    """Times of the links: a NIC's rate in a ring, and seconds per operation."""

    backend: str = "gloo"  # the library of the all-reduces
    bits_per_s: float = float("inf")
    operation_s: float = 0.0
    least_reduce_s: float = 0.0  # of an all-reduce of a few kilobytes, which is the shortest
    least_exchange_s: float = 0.0  # of an all-gather
    least_control_s: float = 0.0  # of an all-reduce of one number
    queue_s: float = USUAL_QUEUE_S  # of traffic that wait for a receiver at most


def time_links(port: ProcessPort, like: Tensor) -> LinkTimes:
    """Measure the bits per second that each NIC sends in a ring all-reduce, and the seconds per operation."""
    small = time_reduce(port, like, SMALL_BYTES)
    first, second = (time_reduce(port, like, size) for size in SIZES_BYTES)
    on_wire = [2 * (port.world - 1) / port.world * size for size in SIZES_BYTES]
    bytes_per_s = (on_wire[1] - on_wire[0]) / max(second - first, 1e-9)
    # The cost of a message of a block's size beyond its bytes. Shapers let the first bytes after a pause pass
    # at once, so it may be less than the time of a small message.
    fixed_s = first - on_wire[0] / bytes_per_s
    return LinkTimes(
        backend=port.backend(like.device),
        bits_per_s=8 * bytes_per_s,
        operation_s=min(small, max(0.0, fixed_s)),
        least_reduce_s=small,
        least_exchange_s=time_gather(port, like, SMALL_BYTES),
        least_control_s=time_reduce(port, like, 4),
    )


def time_queue(port: ProcessPort, like: Tensor, bits_per_s: float) -> float | None:
    """Measure how long traffic waits for this rank where several send to it; None: others are measured.

    None, with a warning, if ranks cannot connect to each other by themselves; None where the links are
    emulated, which does not show in connections of TCP.
    """
    if port.shaper is not None:
        return None

    def sum_of(number: float) -> float:
        numbers = torch.full((1,), number, device=like.device)
        block_on(_wait(port, numbers))
        return float(numbers)

    nbytes = load_bytes(sum_of(bits_per_s) / port.world)  # the same on all ranks
    try:
        return measure_queue(port, like.device, lambda fine: not sum_of(not fine), nbytes)
    except LaunchError as failed:
        log.warning("rank %d: the queues of the links were not measured: %s", port.rank, failed)
        return None


def time_reduce(port: ProcessPort, like: Tensor, nbytes: int) -> float:
    """Measure the median seconds of an all-reduce that all ranks start together."""
    tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=like.device)
    return _time_together(port, like, lambda: _wait(port, tensor))


def time_gather(port: ProcessPort, like: Tensor, nbytes: int) -> float:
    """Measure the median seconds of an all-gather of so many bytes in all, started together."""
    slices = [torch.zeros(nbytes // 4 // port.world, device=like.device) for _ in range(port.world)]
    return _time_together(port, like, lambda: _gather(port, slices))


def _time_together(port: ProcessPort, like: Tensor, start: Callable[[], Coroutine[Any, Any, None]]) -> float:
    barrier = torch.zeros(1, device=like.device)
    took = []
    for _ in range(REPEATS + 1):
        block_on(_wait(port, barrier))
        began = time.perf_counter()
        block_on(start())
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


async def _wait(port: ProcessPort, tensor: Tensor) -> None:
    await port.all_reduce(tensor, Op.SUM)


async def _gather(port: ProcessPort, slices: list[Tensor]) -> None:
    await port.all_gather(slices)


def cluster_of(summary: str, ranks: list[StepTimes], links: LinkTimes) -> Cluster:
    """Describe the measured ranks as a cluster with one group per rank."""
    groups = tuple(
        Workers(
            step_s=Measured(measured_s=tuple(times.seconds), ready=tuple(times.ready)),
            up_bits_per_s=links.bits_per_s,
            down_bits_per_s=links.bits_per_s,
        )
        for times in ranks
    )
    return Cluster(
        workers=groups,
        backend=links.backend,
        operation_s=links.operation_s,
        least_reduce_s=links.least_reduce_s,
        least_exchange_s=links.least_exchange_s,
        least_control_s=links.least_control_s,
        queue_s=links.queue_s if len(groups) > 1 else 0.0,
        forward_share=statistics.median(times.forward_share for times in ranks),
        update_share=statistics.median(times.update_share for times in ranks),
        summary=summary,
    )
