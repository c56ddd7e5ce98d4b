"""offbeat plan: measure the machines, try all candidates in virtual time, and write the best to a file."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from offbeat.cli import options, parse
from offbeat.cli.progress import Display
from offbeat.cli.tables import ranking_table
from offbeat.cli.terminal import Terminal, say
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.settings import non_defaults
from offbeat.errors import SettingError
from offbeat.experiments.calibration import measure_all
from offbeat.experiments.job import Job
from offbeat.experiments.loop import Callback
from offbeat.experiments.planner.candidates import candidates
from offbeat.experiments.planner.plan_file import Plan, Ranked, save_plan
from offbeat.experiments.planner.ranking import Outcome, label_of, ranked, risks
from offbeat.experiments.planner.search import HALF_A_PERCENT, MARGIN, search
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.provenance import origin
from offbeat.strategies.bsp import BSP
from offbeat.worlds.processes.launcher import under_launcher, workers_of_environment
from offbeat.worlds.virtual.cluster import Cluster, load_cluster

HEADER = "# Made by `offbeat plan`, for: offbeat train --from THIS-FILE. Options take precedence over it.\n"


@options.expand_groups
def plan_command(
    task: options.TaskName,
    *,
    out: Annotated[Path, typer.Option(help="The file to write, for `train --from`.")] = Path("plan.toml"),
    cluster: Annotated[
        str | None,
        typer.Option(help="Do not measure: plan for this preset, or the cluster in this TOML file."),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Try only these, and bsp: names, separated by commas. \\[default: all]")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The value to reach. \\[default: bsp's last value, worse by half a percent]"),
    ] = None,
    length: options.Length,
    seeds: Annotated[str, typer.Option(help="Try each candidate with each of these seeds: 0,1,2.")] = "0",
    seed: options.OneSeed = None,
    model: options.Model,
    evaluate_every: options.EvaluateEvery = None,
    data: options.DataFolder = None,
    force: options.Force = False,
    emulated: options.Emulated,
    device: options.Device = "cpu",
    probe_steps: Annotated[int, typer.Option(help="Steps to time on every rank.")] = 30,
    timeout: options.Timeout = 300.0,
) -> None:
    """Find the strategy that reaches --target first on these machines, and write it to a file.

    First, the machines are measured, as by `offbeat calibrate`. Then every candidate trains TASK on the
    measured cluster, in virtual time, until it reaches the target. A candidate that takes a quarter longer
    than the best so far is stopped. To train with the result:  offbeat train --from plan.toml

    The column "risk" lists what was observed: "slips back" (misses the target again within three
    evaluations), "0.02 behind bsp" (after equally many steps), "stale by 5" (gradients of weights 5 steps
    old), "seeds ±20%" (spread of the seconds to the target), "reached by 2 of 3 seeds", "no two runs alike"
    (real runs depend on the order of arrivals at the server), or "none seen".

    On several hosts, start this command with torchrun, like `calibrate`; rank 0 plans after all ranks have
    measured.
    """
    if cluster is not None and under_launcher():
        raise SettingError(f"--cluster {cluster} needs no measurement: start one process, without torchrun")
    if under_launcher():
        length = replace(length, workers=workers_of_environment())
    emulation = parse.emulation_of(emulated, length.workers)
    if cluster is not None and emulation.notes():
        raise SettingError("--bandwidth, --pace and --slow are for measurements: --cluster needs none")
    if probe_steps < 1:
        raise SettingError(f"--probe-steps {probe_steps}: at least 1 is needed")
    chosen = candidates(parse.names_of(strategies))
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
        measured = described = probe(job, run_options, probe_steps)
        if described is None:
            return
    samples = job.task.load(data).to(device)
    progress = SearchProgress(console, len(chosen), len(all_seeds))
    try:
        for outcome in search(job, chosen, all_seeds, described, samples, progress.callbacks, device):
            progress.add(outcome, derived_target=target is None)
    except KeyboardInterrupt:
        progress.show()
        console.say(f"interrupted: {out} is not written", style="yellow")
        raise
    progress.show()
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
        made_by=origin()["command"],
        ranking=progress.ranking_records(),
        measured=measured,
    )
    save_plan(out, plan, HEADER)
    console.print(f"chosen: [bold]{escape(best.label)}[/]")
    console.say(f"written: {out}; to train with it: offbeat train --from {out}")


def probe(job: Job, run_options: RunOptions, steps: int) -> Cluster | None:
    """Measure the available machines as a cluster; return None on ranks that do not plan."""
    with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as folder:
        file = Path(folder) / "cluster.toml"
        continues = measure_all(job.workers, job.task, run_options, steps, file, say)
        return load_cluster(file) if continues else None


class SearchProgress:
    """The outcomes of a search so far, shown as they become known."""

    def __init__(self, console: Terminal, candidates: int, seeds: int) -> None:
        self.outcomes: list[Outcome] = []
        self._console = console
        self._candidates = candidates
        self._seeds = seeds

    @property
    def target(self) -> float | None:
        """The value to reach; None until the first outcome is known."""
        return self.outcomes[0].trials[0].job.target if self.outcomes else None

    def ranking(self) -> list[Outcome]:
        """Return the outcomes, the best first."""
        return ranked(self.outcomes)

    def callbacks(self, job: Job, ledgers: list[Ledger]) -> list[Callback]:
        """Make the callbacks of a trial: a line of progress."""
        seed = f" seed {job.seed}" if self._seeds > 1 else ""
        label = f"{len(self.outcomes) + 1} of {self._candidates}: {label_of(job.strategy)}{seed}"

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        return [Display(latest, label=label)]

    def add(self, outcome: Outcome, derived_target: bool) -> None:
        """Add an outcome and print it; after the first one, also print a derived target."""
        self.outcomes.append(outcome)
        number = f"{len(self.outcomes)} of {self._candidates}"
        result = outcome.failure or f"{outcome.seconds.mean:.3g} s to {self.target:g}"
        self._console.say(f"{number}: {outcome.label}: {result}")
        if derived_target and len(self.outcomes) == 1:
            self._console.warn(
                f"no --target was given: bsp ends at {outcome.value.mean:.4g}, so the target is "
                f"{self.target:.4g}, {HALF_A_PERCENT:.1%} worse"
            )

    def show(self) -> None:
        """Print the ranking as a table."""
        if not self.outcomes:
            return
        metric = self.outcomes[0].trials[0].job.task.metric
        self._console.print()
        self._console.print(ranking_table(self.ranking(), self.target, metric, self.risk))
        if any(trial.stopped for outcome in self.outcomes for trial in outcome.trials):
            self._console.print(
                f"stopped: not at the target after {MARGIN:g}x the seconds of the best candidate so far"
            )

    def risk(self, outcome: Outcome) -> str:
        """Describe the risks seen in an outcome's trials."""
        return ", ".join(risks(outcome, self.outcomes[0])) or "none seen"

    def ranking_records(self) -> tuple[Ranked, ...]:
        """Return the ranking as the plan file holds it."""
        return tuple(
            Ranked(
                strategy=outcome.strategy.name,
                strategy_settings=non_defaults(type(outcome.strategy), outcome.strategy.settings()),
                seconds_to_target=outcome.seconds.mean if outcome.succeeds else None,
                bytes_sent=outcome.nbytes.mean,
                value=outcome.value.mean,
                fate=outcome.failure,
                risk=self.risk(outcome),
            )
            for outcome in self.ranking()
        )
