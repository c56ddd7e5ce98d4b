"""offbeat plan: measure the machines, try every candidate on them in virtual time, and keep the best one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from offbeat.cli import options
from offbeat.cli.calibrate import measure_all
from offbeat.cli.progress import Display, shown
from offbeat.cli.terminal import Terminal
from offbeat.core.ledger import Ledger, WorkerTotals
from offbeat.core.settings import non_defaults
from offbeat.core.units import size
from offbeat.errors import SettingError
from offbeat.experiments.loop import Callback, Job
from offbeat.experiments.planner.candidates import candidates
from offbeat.experiments.planner.plan_file import Plan, Ranked, save_plan
from offbeat.experiments.planner.ranking import Outcome, label_of, ranked, risks
from offbeat.experiments.planner.search import HALF_A_PERCENT, MARGIN, search
from offbeat.experiments.process_run import RunOptions
from offbeat.experiments.provenance import origin
from offbeat.strategies.bsp import BSP
from offbeat.worlds.processes.launcher import under_launcher, workers_of_environment
from offbeat.worlds.virtual.cluster import Cluster, load_cluster


def plan_command(
    task: options.TaskName,
    out: Annotated[Path, typer.Option(help="The file to write, for `train --from`.")] = Path("plan.toml"),
    cluster: Annotated[
        str | None,
        typer.Option(help="Do not measure: plan for this preset or TOML file, which need not exist."),
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Try only these, and bsp: names, separated by commas. [default: all]")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The value to reach. [default: what bsp ends at, less half a percent of it]"),
    ] = None,
    workers: options.Workers = 4,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    seeds: Annotated[str, typer.Option(help="Try each candidate with each of these: 0,1,2.")] = "0",
    seed: Annotated[int | None, typer.Option(help="One seed: the same as --seeds.")] = None,
    model: options.Model = None,
    batch_size: options.BatchSize = None,
    lr: options.LearningRate = None,
    evaluate_every: options.EvaluateEvery = None,
    data: options.DataFolder = None,
    force: options.Force = False,
    bandwidth: options.Bandwidth = None,
    pace: options.Pace = None,
    slow: options.Slow = None,
    device: options.Device = "cpu",
    probe_steps: Annotated[int, typer.Option(help="Steps to time on every rank.")] = 30,
    timeout: options.Timeout = 300.0,
) -> None:
    """Find out which strategy reaches --target first on these machines, and write it to a file.

    First a probe, as `offbeat calibrate` does it; then every candidate trains TASK on what was measured, in
    virtual time, until it reaches the target. One that takes a quarter longer than the best so far is
    stopped, and the table says so. Then:  offbeat train --from plan.toml

    The column "risk" tells what was seen: "slips back" (below the target again within three evaluations),
    "0.02 behind bsp" (after equally many steps), "stale by 5" (computed with weights as many steps old),
    "seeds ±20%" (seconds to the target), "reached by 2 of 3 seeds". Nothing of it: "none seen".

    On the cluster itself, start it with torchrun, like `calibrate`; rank 0 plans when all have measured.
    """
    if cluster is not None and under_launcher():
        raise SettingError(f"--cluster {cluster} measures nothing: start it once, without torchrun")
    workers = workers_of_environment() if under_launcher() else workers
    emulation = options.emulation_of(bandwidth, pace, slow, workers)
    if cluster is not None and emulation.notes():
        raise SettingError("--bandwidth, --pace and --slow are for the probe: --cluster has none")
    if probe_steps < 1:
        raise SettingError(f"--probe-steps {probe_steps}: at least 1 is needed")
    chosen = candidates(strategies)
    numbers = options.seeds_of(seeds) if seed is None else [seed]
    job = Job(
        task=options.task_of(task, model=model, batch_size=batch_size, lr=lr),
        strategy=BSP(),
        workers=workers,
        seed=numbers[0],
        epochs=epochs,
        steps=steps,
        evaluate_every=evaluate_every,
        target=target,
    )
    described = load_cluster(cluster).for_workers(workers) if cluster is not None else None
    options.check_device(device)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        options.check_file(out)
        if out.exists() and not force:
            raise SettingError(f"{out} exists: choose another --out, or give --force")
    console = Terminal(quiet=not first)
    for note in emulation.notes():
        console.warn(note)
    place = RunOptions(data=data, device=device, timeout_s=timeout, emulation=emulation)
    measured = None
    if described is None:
        measured = described = probe(job, place, probe_steps)
        if described is None:
            return
    samples = job.task.load(data).to(device)
    found = Findings(console, len(chosen), len(numbers))
    try:
        for outcome in search(job, chosen, numbers, described, samples, found.watching, device):
            found.add(outcome, target)
    except KeyboardInterrupt:
        found.show()
        console.say(f"interrupted: {out} is not written", style="yellow")
        raise
    found.show()
    best = found.ranking()[0]
    if not best.succeeds or found.target is None:
        raise SettingError(
            f"no candidate reached {found.target:g} with every seed, so {out} is not written: give a lower "
            "--target, or more --steps"
        )
    plan = Plan(
        task=job.task.name,
        model=job.task.model,
        batch_size=job.task.batch_size,
        lr=job.task.lr,
        strategy=best.strategy.name,
        strategy_settings=non_defaults(type(best.strategy), best.strategy.settings()),
        workers=workers,
        steps=job.total_steps(len(samples)),
        target=found.target,
        seed=numbers[0],
        evaluate_every=evaluate_every,
        bandwidth=bandwidth,
        pace=pace,
        slow=tuple(slow or ()),
        device=device,
        cluster=cluster,
        made_by=origin()["command"],
        ranking=found.told(),
        measured=measured,
    )
    save_plan(out, plan)
    console.print(f"chosen: [bold]{escape(best.label)}[/]")
    console.say(f"written: {out}; train so: offbeat train --from {out}")


def probe(job: Job, place: RunOptions, steps: int) -> Cluster | None:
    """What the machines at hand give; None on ranks that have nothing more to do."""
    with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as folder:
        file = Path(folder) / "cluster.toml"
        return load_cluster(file) if measure_all(job.workers, job.task, place, steps, file) else None


class Findings:
    """What is known so far, and how it is shown."""

    def __init__(self, console: Terminal, candidates: int, seeds: int) -> None:
        self.outcomes: list[Outcome] = []
        self._console = console
        self._candidates = candidates
        self._seeds = seeds

    @property
    def target(self) -> float | None:
        return self.outcomes[0].trials[0].job.target if self.outcomes else None

    def ranking(self) -> list[Outcome]:
        return ranked(self.outcomes)

    def watching(self, job: Job, ledgers: list[Ledger]) -> list[Callback]:
        """The line of progress of a trial."""
        seed = f" seed {job.seed}" if self._seeds > 1 else ""
        label = f"{len(self.outcomes) + 1} of {self._candidates}: {label_of(job.strategy)}{seed}"

        def latest() -> list[WorkerTotals]:
            return [ledger.totals() for ledger in ledgers]

        return [Display(latest, label=label)]

    def add(self, outcome: Outcome, asked: float | None) -> None:
        self.outcomes.append(outcome)
        number = f"{len(self.outcomes)} of {self._candidates}"
        said = outcome.fate or f"{outcome.seconds.mean:.3g} s to {self.target:g}"
        self._console.say(f"{number}: {outcome.label}: {said}")
        if asked is None and len(self.outcomes) == 1:
            self._console.warn(
                f"no --target was given: bsp ends at {outcome.value.mean:.4g}, so the target is "
                f"{self.target:.4g}, {HALF_A_PERCENT:.1%} worse"
            )

    def show(self) -> None:
        """The ranking as a table."""
        if not self.outcomes:
            return
        self._console.print()
        self._console.print(self._table())
        if any(trial.stopped for outcome in self.outcomes for trial in outcome.trials):
            self._console.print(
                f"stopped: not at the target after {MARGIN:g} times the seconds of the best one until then"
            )

    def risk(self, outcome: Outcome) -> str:
        return ", ".join(risks(outcome, self.outcomes[0])) or "none seen"

    def told(self) -> tuple[Ranked, ...]:
        """The ranking as the file holds it."""
        return tuple(
            Ranked(
                strategy=outcome.strategy.name,
                strategy_settings=non_defaults(type(outcome.strategy), outcome.strategy.settings()),
                seconds_to_target=outcome.seconds.mean if outcome.succeeds else None,
                bytes_sent=outcome.nbytes.mean,
                value=outcome.value.mean,
                fate=outcome.fate,
                risk=self.risk(outcome),
            )
            for outcome in self.ranking()
        )

    def _table(self) -> Table:
        metric = self.outcomes[0].trials[0].job.task.metric
        table = Table("", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("candidate", min_width=18, overflow="fold")
        for column in (f"s to {self.target:.4g}", "bytes", metric):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("risk")
        for number, outcome in enumerate(self.ranking(), 1):
            table.add_row(
                str(number),
                f"[bold]{escape(outcome.label)}[/]",
                outcome.fate or shown(outcome.seconds, "{:.3g}".format),
                shown(outcome.nbytes, size),
                shown(outcome.value, "{:.4f}".format),
                self.risk(outcome),
            )
        return table
