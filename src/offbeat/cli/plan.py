"""offbeat plan: measure the machines, try all candidates in virtual time, and write the best to a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from offbeat.cli import completion, options
from offbeat.cli.terminal import Terminal, say, say_nothing
from offbeat.errors import SettingError

if TYPE_CHECKING:
    from offbeat.codecs import Codec
    from offbeat.experiments.job import Job
    from offbeat.experiments.process_run import RunOptions
    from offbeat.worlds.virtual.cluster import Cluster

HEADER = "# Made by `offbeat plan`, for: offbeat train --from THIS-FILE. Options take precedence over it.\n"


@options.expand_groups
def plan_command(
    task: options.TaskName,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write, for `train --from`.")
    ] = Path("plan.toml"),
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            autocompletion=completion.cluster_names,
            metavar="NAME",
            help="Do not measure: plan for this preset, or the cluster in this TOML file.",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            "-s",
            metavar="NAME,…",
            autocompletion=completion.strategy_lists,
            help="Try only these, and bsp: names, separated by commas. \\[default: all]",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            "-t",
            metavar="VALUE",
            help="The value to reach. \\[default: bsp's last value, worse by half a percent]",
        ),
    ] = None,
    length: options.Length,
    seeds: Annotated[
        str, typer.Option(metavar="N,N,…", help="Try each candidate with each of these seeds first: 0,1,2.")
    ] = "0",
    seed: options.OneSeed = None,
    most_seeds: Annotated[
        int,
        typer.Option(metavar="N", help="Run candidates that are close with up to so many seeds.", min=1),
    ] = 6,
    model: options.Model,
    evaluate_every: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps between evaluations. \\[default: a hundredth of all]"),
    ] = None,
    data: options.DataFolder = None,
    force: options.Force = False,
    emulated: options.Emulated,
    failures: options.Failures,
    trace: options.PlanTrace = None,
    device: options.Device = "cpu",
    probe_steps: Annotated[int, typer.Option(metavar="N", help="Steps to time on every rank.")] = 30,
    timeout: options.Timeout = 300.0,
    quiet: options.Quiet = False,
) -> None:
    """Find the strategy that reaches --target first on these machines, and write it to a file.

    First, the machines are measured, as by `offbeat calibrate`. Then every candidate trains TASK on the
    measured cluster, in virtual time, until it reaches the target. A candidate that takes half as long again
    as the best so far is stopped. Those that are close run again with more seeds, until they are apart (95%)
    or too close to call. To train with the result:  offbeat train --from plan.toml

    The column "risk" lists what was observed: "slips back" (misses the target again, on average, after
    reaching it), "0.02 behind bsp" (after equally many steps), "stale by 5" (gradients of weights 5 steps
    old), "seeds ±20%" (spread of the seconds to the target), "reached by 2 of 3 seeds", "no two runs alike"
    (real runs depend on the order of arrivals at the server), or "none seen".

    With --mtbf or --trace workers die and return in virtual time: elastic ones, or at a server. The table
    then has the goodput, in samples per second that count, and with --price the money until the target.

    On several hosts, start this command with torchrun, like `calibrate`; rank 0 plans after all ranks have
    measured.
    """
    from offbeat.cli import parse
    from offbeat.cli.search_progress import SearchProgress
    from offbeat.core.settings import non_defaults
    from offbeat.experiments.planner.candidates import candidates, codecs_of, untimed
    from offbeat.experiments.planner.plan_file import Plan, save_plan
    from offbeat.experiments.planner.race import MOST_SEEDS
    from offbeat.experiments.planner.search import evaluation_steps, search
    from offbeat.experiments.process_run import RunOptions
    from offbeat.experiments.provenance import origin
    from offbeat.strategies.bsp import BSP
    from offbeat.worlds.processes.launcher import under_launcher, workers_of_environment
    from offbeat.worlds.virtual.cluster import load_cluster

    if cluster is not None and under_launcher():
        raise SettingError(f"--cluster {cluster} needs no measurement: start one process, without torchrun")
    if under_launcher():
        length = replace(length, workers=workers_of_environment())
    emulation = parse.emulation_of(emulated, length.workers)
    if cluster is not None and emulation.notes():
        raise SettingError("--bandwidth, --pace and --slow are for measurements: --cluster needs none")
    if probe_steps < 1:
        raise SettingError(f"--probe-steps {probe_steps}: at least 1 is needed")
    if most_seeds > MOST_SEEDS:
        raise SettingError(f"--most-seeds {most_seeds}: at most {MOST_SEEDS} are possible")
    away, price = parse.failures_of(failures, trace), parse.price_of(failures.price)
    chosen = candidates(parse.names_of(strategies), length.workers)
    all_seeds = parse.seeds_of(seeds) if seed is None else [seed]
    course = options.Course(target=target, evaluate_every=evaluate_every)
    job = parse.job_of(parse.task_of(task, model), BSP(), all_seeds[0], length, course)
    described = load_cluster(cluster).for_workers(job.workers) if cluster is not None else None
    options.check_device(device)
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if is_rank_0:
        options.check_new_file(out, force)
    console = Terminal(quiet=not is_rank_0)
    for note in emulation.notes():
        console.warn(note)
    run_options = RunOptions(data=data, device=device, timeout_s=timeout, emulation=emulation)
    measured = None
    if described is None:
        measured = described = probe(job, run_options, probe_steps, codecs_of(chosen), quiet)
        if described is None:
            return
    samples = job.task.load(data).to(device)
    job = replace(job, evaluate_every=evaluation_steps(job, len(samples)))
    progress = SearchProgress(console, len(chosen), quiet, price, away is not None)
    race = (device, most_seeds, away)
    try:
        for outcome in search(job, chosen, all_seeds, described, samples, progress.callbacks, *race):
            progress.add(outcome, derived_target=target is None)
    except KeyboardInterrupt:
        progress.show()
        console.say(f"interrupted: {out} is not written", style="yellow")
        raise
    progress.show()
    if free := untimed(chosen, described):
        console.warn(
            f"on this cluster {free} compute in no time: `offbeat calibrate --codec …` measures them"
        )
    best = progress.ranking()[0]
    if not best.succeeds or progress.target is None:
        raise SettingError(
            f"no candidate reached {progress.target:g} with every seed, so {out} is not written: give a "
            "lower --target, or more --steps"
        )
    plan = Plan(
        task=job.task.name,
        model=job.task.model,
        batch_size=job.task.batch_size,
        lr=job.task.lr,
        strategy=best.strategy.name,
        strategy_settings=non_defaults(type(best.strategy), best.strategy.settings()),
        workers=job.workers,
        steps=job.total_steps(len(samples)),
        target=progress.target,
        seed=all_seeds[0],
        evaluate_every=evaluate_every,
        bandwidth=emulated.bandwidth,
        pace=emulated.pace,
        slow=tuple(emulated.slow or ()),
        device=device,
        cluster=cluster,
        elastic=away is not None and best.repeats,
        mtbf=failures.mtbf,
        rejoin=failures.rejoin,
        spot_trace=None if trace is None else str(trace),
        price=failures.price,
        made_by=origin()["command"],
        ranking=progress.ranking_records(),
        measured=measured,
    )
    save_plan(out, plan, HEADER)
    console.print(f"chosen: [bold]{escape(best.label)}[/]")
    console.say(f"written: {out}")
    console.say(f"to train with it: offbeat train --from {out}")


def probe(
    job: Job, run_options: RunOptions, steps: int, codecs: Sequence[Codec], quiet: bool = False
) -> Cluster | None:
    """Measure the available machines, and codecs on them, as a cluster; return None if not rank 0."""
    from offbeat.experiments.calibration import measure_all
    from offbeat.worlds.virtual.cluster import load_cluster

    with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as folder:
        file = Path(folder) / "cluster.toml"
        continues = measure_all(
            job.workers, job.task, run_options, steps, file, say_nothing if quiet else say, codecs
        )
        return load_cluster(file) if continues else None
