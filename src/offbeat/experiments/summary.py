"""The result of a run as `summary.json` holds it. Fields may be added, never renamed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbeat.core.files import write_atomic
from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.job import EQUAL, SHARED, Job
from offbeat.experiments.loop import REPLICA_VALUE, Evaluation

Summary = dict[str, Any]


def summarize(
    job: Job,
    world: str,
    history: list[Evaluation],
    worker_totals: list[WorkerTotals],
    *,
    complete: bool,
    **extra: Any,
) -> Summary:
    """Build the summary of a run. `extra` adds entries of the world, such as the emulation."""
    better = max if job.task.higher_is_better else min
    values = [evaluation.value for evaluation in history]
    numbers = [value for value in values if not math.isnan(value)]  # NaN has no order
    seconds = history[-1].seconds if history else max((t.seconds for t in worker_totals), default=0.0)
    samples = sum(t.samples for t in worker_totals)
    reached = first_at_target(job, history)
    return {
        "strategy": job.strategy.name,
        "settings": job.strategy.settings(),
        "task": job.task.name,
        "model": job.task.model,
        "world": world,
        "workers": job.workers,
        "seed": job.seed,
        "schedule": job.schedule,
        "order": job.order,
        "skew": job.skew,
        "inject": job.inject,
        "work": SHARED if job.shares_work else EQUAL,
        "complete": complete,
        "steps": max((t.steps for t in worker_totals), default=0),
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "bytes_sent": sum(t.bytes_sent for t in worker_totals),
        "bytes_left_host": sum(t.bytes_left_host for t in worker_totals),
        "bytes_server": sum(t.bytes_server for t in worker_totals),
        "bytes_total": sum(t.bytes_total for t in worker_totals),
        "sync_steps": max((t.sync_steps for t in worker_totals), default=0),
        "local_steps": max((t.local_steps for t in worker_totals), default=0),
        "lssr": min((t.lssr for t in worker_totals), default=0.0),
        "outliers": sum(t.outliers for t in worker_totals),
        "rosters": max((t.rosters for t in worker_totals), default=0),
        "lost_steps": sum(t.lost_steps for t in worker_totals),
        "lost_s": max((t.lost_s for t in worker_totals), default=0.0),
        "metric": job.task.metric,
        "value": values[-1] if values else None,
        REPLICA_VALUE: history[-1].extra_metrics.get(REPLICA_VALUE) if history else None,
        "higher_is_better": job.task.higher_is_better,
        "best": better(numbers) if numbers else None,
        "target": job.target,
        "seconds_to_target": None if reached is None else reached.seconds,
        "bytes_to_target": None if reached is None else reached.bytes_total,
        **extra,
        "per_worker": [asdict(t) for t in worker_totals],
        "history": [evaluation.to_json() for evaluation in history],
    }


def first_at_target(job: Job, history: list[Evaluation]) -> Evaluation | None:
    """Return the first evaluation that reached the target; None if none did."""
    if job.target is None:
        return None
    sign = 1 if job.task.higher_is_better else -1
    return next((e for e in history if sign * e.value >= sign * job.target), None)


def write_summary(folder: Path, summary: Summary | list[Summary], name: str = "summary.json") -> Path:
    """Write a summary, or those of several runs, as JSON in which every number is finite."""
    return write_atomic(folder / name, json.dumps(json_safe(summary), indent=1, allow_nan=False))


def json_safe(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
