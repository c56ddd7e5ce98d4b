"""offbeat simulate: train a task on a virtual cluster, which need not exist."""

from __future__ import annotations

import time

from offbeat.cli import options
from offbeat.cli.terminal import Terminal
from offbeat.errors import SettingError

SHOWN_WORKERS = 16


@options.expand_groups
def simulate_command(
    task: options.TaskName,
    *,
    cluster: options.ClusterName = "lan-1g",
    strategy: options.StrategyName = "bsp",
    settings: options.Settings = None,
    length: options.Length,
    seed: options.Seed = 0,
    model: options.Model,
    course: options.Course,
    folders: options.Folders,
    elastic: options.Elastic,
    device: options.Device = "cpu",
    until: options.Until = None,
    trace: options.Trace = None,
    spot_trace: options.SpotTraceFile = None,
    live: options.LiveOutputs,
) -> None:
    """Train TASK on a virtual CLUSTER, in one process, and write summary.json.

    The model, the data and the gradients are real; the seconds are those that the cluster would take.
    """
    from offbeat.cli import parse
    from offbeat.cli.outputs import RunCallbacks
    from offbeat.cli.progress import report_interrupt, virtual_note
    from offbeat.cli.tables import result_table, worker_table
    from offbeat.experiments.report.aggregate import cautions
    from offbeat.experiments.virtual_run import simulate_here
    from offbeat.worlds.virtual.spot_trace import is_spot_trace, load_spot_trace

    chosen = parse.strategy_of(strategy, settings or [])
    job = parse.job_of(parse.task_of(task, model), chosen, seed, length, course)
    minimum = elastic.minimum if elastic.elastic else None
    if minimum is not None:
        job.check_elastic(minimum)
    note = virtual_note(job.workers, cluster)
    options.check_device(device)
    options.check_file(trace)
    if trace is not None and is_spot_trace(trace):
        raise SettingError(
            f"--trace {trace} would be overwritten by a timeline, and holds spot preemptions: give it as "
            "--spot-trace"
        )
    away = None if spot_trace is None else load_spot_trace(spot_trace)
    until_s = parse.until_of(until)
    live.check(folders.force)
    out = parse.out_of(folders.out, task, strategy, "virtual")
    options.claim(out, folders.force)
    data = job.task.load(folders.data).to(device)

    console = Terminal()
    began = time.monotonic()
    with report_interrupt(console, out / "summary.json"):
        callbacks = RunCallbacks(live, (note,))
        summary = simulate_here(job, cluster, data, out, callbacks, device, trace, minimum, away, until_s)
    took_s = time.monotonic() - began
    if job.workers <= SHOWN_WORKERS:
        console.show(worker_table(summary))
    console.show(result_table([summary]))
    if minimum is not None:
        console.tell(
            f"{summary['rosters']} rosters; lost: {summary['lost_steps']} steps, {summary['lost_s']:.4g} s"
        )
    console.tell(f"{summary['seconds']:.3g} virtual seconds in {took_s:.1f} real ones")
    for caution in cautions([summary]):
        console.warn(caution)
    console.say(f"written: {out / 'summary.json'}")
