"""Summary: the outcome of a run as `summary.json` holds it. Fields may be added, never renamed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbeat.core.files import write_atomic
from offbeat.core.ledger import WorkerTotals
from offbeat.experiments.loop import Evaluation, Job

Summary = dict[str, Any]


def summarize(
    job: Job,
    world: str,
    history: list[Evaluation],
    entries: list[WorkerTotals],
    *,
    complete: bool,
    **extra: Any,
) -> Summary:
    """What a run came to. `extra` says what was emulated, and the like."""
    better = max if job.task.higher_is_better else min
    values = [point.value for point in history]
    numbers = [value for value in values if not math.isnan(value)]  # neither better nor worse than any
    seconds = history[-1].seconds if history else max((e.seconds for e in entries), default=0.0)
    samples = sum(e.samples for e in entries)
    reached = point_of_target(job, history)
    return {
        "strategy": job.strategy.name,
        "settings": job.strategy.settings(),
        "task": job.task.name,
        "model": job.task.model,
        "world": world,
        "workers": job.workers,
        "seed": job.seed,
        "order": job.order,
        "skew": job.skew,
        "inject": job.inject,
        "complete": complete,
        "steps": max((e.steps for e in entries), default=0),
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "bytes_sent": sum(e.bytes_sent for e in entries),
        "sync_steps": max((e.sync_steps for e in entries), default=0),
        "local_steps": max((e.local_steps for e in entries), default=0),
        "lssr": min((e.lssr for e in entries), default=0.0),
        "metric": job.task.metric,
        "value": values[-1] if values else None,
        "higher_is_better": job.task.higher_is_better,
        "best": better(numbers) if numbers else None,
        "target": job.target,
        "seconds_to_target": None if reached is None else reached.seconds,
        "bytes_to_target": None if reached is None else reached.bytes_sent,
        **extra,
        "per_worker": [asdict(e) for e in entries],
        "history": [asdict(p) for p in history],
    }


def point_of_target(job: Job, history: list[Evaluation]) -> Evaluation | None:
    """The first evaluation that reached the target; None if none did."""
    if job.target is None:
        return None
    sign = 1 if job.task.higher_is_better else -1
    return next((p for p in history if sign * p.value >= sign * job.target), None)


def write(folder: Path, summary: Summary | list[Summary], name: str = "summary.json") -> Path:
    """Write JSON, every number of it finite."""
    return write_atomic(folder / name, json.dumps(json_safe(summary), indent=1, allow_nan=False))


def json_safe(value: Any) -> Any:
    """JSON knows no NaN and no infinity: what diverged is null."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
